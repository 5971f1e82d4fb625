"""How long it takes to plan one job, and to list its options.

Promised: Llama-70B on 128 GPUs of 4 types with all mixed ways in 0.5 s, the options of one job on 4
types with up to 64 GPUs each in 100 ms, both cold (nothing of that job or hardware cached), and
1,024 GPUs of 8 types by uneven shares in 1 s. The best of three runs, each in a process of its own;
imports are not counted. A busy machine only ever adds.
"""

from __future__ import annotations

import subprocess
import sys
import time
from collections.abc import Callable
from pathlib import Path

from figures import print_figures

RUNS = 3
EIGHT = "A100-80G,H100-80G,L40S,V100-32G,A6000,L4,A10G,T4"
PROMISED_SECONDS = {
    "70B on 128 GPUs of 4 types, all ways": 0.5,
    "options of 8B, 4 types up to 64 GPUs": 0.1,
    "1,024 GPUs of 8 types, uneven": 1.0,
    "options again": 0.01,
    "options after a correction": 0.01,
}
KEYS = ("plan", "options", "uneven", "options_again", "correction")


def measure() -> None:
    """Print the seconds of each promise, in this process."""
    from drystone.describe.files.cluster import parse_cluster
    from drystone.describe.files.job import make_job
    from drystone.describe.model_source import find_model
    from drystone.describe.pool import parse_pool
    from drystone.describe.recipe import Precision, Recipe
    from drystone.plan.options import enumerate_options
    from drystone.plan.search import plan_job
    from drystone.plan.uneven.data_parallel import plan_uneven
    from drystone.run.control.live_state import Lesson
    from drystone.run.control.options import OptionBook, work_of

    def seconds(run: Callable[[], object]) -> tuple[float, float]:
        start, start_cpu = time.perf_counter(), time.process_time()
        run()
        return time.perf_counter() - start, time.process_time() - start_cpu

    large, small = find_model("llama-2-70b"), find_model("llama-3.1-8b")
    recipe = Recipe(seq_len=4096, global_batch=512)
    four = parse_pool("32xA100-80G,32xH100-80G,32xL40S,32xA6000")
    sixty_four = parse_pool("64xA100-80G,64xH100-80G,64xL40S,64xA6000")
    eight = parse_pool(",".join(f"128x{name}" for name in EIGHT.split(",")))
    batch = Recipe(seq_len=4096, global_batch=4096, precision=Precision.FP16_MIXED)
    names = list(PROMISED_SECONDS)
    found = [
        seconds(lambda: plan_job(large, recipe, four)),
        seconds(lambda: enumerate_options(small, recipe, sixty_four)),
        seconds(lambda: plan_uneven(small, batch, eight)),
        seconds(lambda: enumerate_options(small, recipe, sixty_four)),
    ]
    nodes = ", ".join(
        f"{{gpu: {gpu}, count: 8, gpus_per_node: 8}}" for gpu in ("A100", "H100", "L40S", "A6000")
    )
    lessons: dict[str, Lesson] = {}
    book = OptionBook(parse_cluster(f"nodes: [{nodes}]"), lessons=lessons)
    job = make_job(
        {"model": "llama-3.1-8b", "train": {"steps": 1, "batch": 512, "sequence": 4096}},
        folder=Path.cwd(),
    )
    book.options(job)
    lessons[work_of(job)] = Lesson(speeds={}, factors={(("L40S-48GB", 1),): 0.8})
    found.append(seconds(lambda: book.options(job)))
    for name, (value, cpu) in zip(names, found, strict=True):
        print(f"{name}\t{value}\t{cpu}")


def main() -> int:
    """The best of some runs against what is promised."""
    best: dict[str, float] = {}
    best_cpu: dict[str, float] = {}
    for _ in range(RUNS):
        run = subprocess.run(
            [sys.executable, __file__, "once"], capture_output=True, text=True, check=True
        )
        for line in run.stdout.splitlines():
            name, value, cpu = line.split("\t")
            best[name] = min(best.get(name, float("inf")), float(value))
            best_cpu[name] = min(best_cpu.get(name, float("inf")), float(cpu))
    for name, value in best.items():
        promised = PROMISED_SECONDS[name]
        print(
            f"{name:40s} {1e3 * value:8.1f} ms   {value / promised:5.2f} of what is promised, "
            f"{1e3 * best_cpu[name]:.1f} ms of CPU"
        )
    keys = dict(zip(PROMISED_SECONDS, KEYS, strict=True))
    print_figures(
        {f"{keys[name]}_seconds": value for name, value in best.items()}
        | {f"{keys[name]}_cpu_seconds": value for name, value in best_cpu.items()}
    )
    return int(any(value > PROMISED_SECONDS[name] for name, value in best.items()))


if __name__ == "__main__":
    if sys.argv[1:] == ["once"]:
        measure()
    else:
        sys.exit(main())
