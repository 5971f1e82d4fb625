"""2. Does it fit? Memory of one layout, item by item, on several GPU types."""

from drystone.describe.catalogue import find_gpu
from drystone.describe.layout import Layouts, parse_layout
from drystone.describe.model_source import find_model
from drystone.describe.recipe import Recipe
from drystone.estimate.memory.peak import estimate_memory
from drystone.units import GiB

model = find_model("llama-3-8b")
layout = Layouts.of([parse_layout("dp=8,micro=1,zero=3")])
recipe = Recipe(seq_len=4096, global_batch=8)
for name in ("A100-80G", "A100-40G", "L40S"):
    gpu = find_gpu(name)
    memory = estimate_memory(model, recipe, layout, gpu=gpu)
    low, high = (float(one[0]) / GiB for one in memory.required_range())
    verdict = "fits" if memory.fits(gpu)[0] else "does not fit"
    room = gpu.usable_bytes / GiB
    print(f"8 x {gpu.name}: needs {low:.1f} to {high:.1f} of {room:.1f} GiB: {verdict}")
sizes = {name: float(size[0]) / GiB for name, size in memory.items().items()}
largest = sorted(sizes, key=lambda name: -sizes[name])[:3]
print("most of it:", ", ".join(f"{name} {sizes[name]:.1f} GiB" for name in largest))
