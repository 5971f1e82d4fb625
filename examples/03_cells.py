"""3. Cells: resources fixed, every data x tensor x pipeline split of them judged at once."""

from drystone.describe.catalogue import find_gpu
from drystone.describe.machine import default_machine
from drystone.describe.model_source import find_model
from drystone.describe.recipe import Recipe
from drystone.plan.cells.search import search_cells
from drystone.units import GiB

recipe = Recipe(seq_len=4096, global_batch=64)
machine = default_machine(find_gpu("A100-80G"))
cells = search_cells(find_model("llama-2-13b"), recipe, machine, (4, 8, 16))
print(f"{len(cells)} layouts fit")
best = cells.best()
for index in range(len(best)):
    layout, count = best.layout(index), best.layouts.num_gpus[index]
    seconds, memory = best.step_seconds[index], best.high_bytes[index] / GiB
    print(f"{count:2} GPUs: {layout}  {seconds:.1f} s a step, {memory:.0f} GiB at most")
