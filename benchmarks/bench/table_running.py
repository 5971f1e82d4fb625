"""The second half of the table: what trains, serves, and recovers."""

from __future__ import annotations

from typing import Final

from bench.spec import Benchmark, Part, at_least, at_most, shown, within
from bench.table import AIM, DECISIONS, ESTIMATES, MONEY, PLANS, POLICIES, SIMULATOR

FSDP2: Final = "aim, of FSDP2 in the same run"

RUNTIME = Part(
    title="Training on unlike devices",
    benchmarks=(
        Benchmark(
            name="uneven_replay",
            about="What does an uneven split gain, by replay of recorded logs?",
            script="runtime_speedup.py", arguments="--replay", quick="--replay", limit_seconds=600,
            needs=("torch",),
            figures=(
                at_least("even_of_uneven", "even split, of uneven; speeds 1:3 and 1:1:2:4, worst",
                         1.95, "x", "aim; the limit is 2"),
                at_least("fsdp2_median_of_uneven",
                         "even FSDP2, of uneven; its gathers as long as in the median here", 2.1,
                         "x", AIM, clock=True, known="docs/runtime.md"),
                shown("fsdp2_shortest_of_uneven", "the same; as long as its shortest here", "x",
                      clock=True),
                shown("fsdp2_wire_0.05_of_uneven", "even FSDP2, of uneven, on a quick wire", "x"),
                shown("fsdp2_wire_0.1_of_uneven", "even FSDP2, of uneven, on a wire half as quick",
                      "x"),
            ),
        ),
        Benchmark(
            name="uneven_training",
            about="What does an uneven split gain on two emulated devices of speeds 1:3?",
            script="runtime_speedup.py", limit_seconds=600, needs=("torch",),
            figures=(
                at_least("even_of_uneven", "even split, of uneven", 1.95, "x",
                         "aim; the limit is 2", clock=True),
                at_least("fsdp2_of_uneven", "even FSDP2 with accumulation, of uneven", 2.1, "x",
                         AIM, clock=True, known="docs/runtime.md"),
            ),
        ),
        Benchmark(
            name="uneven_training_four",
            about="The same on four devices of speeds 1:1:2:4",
            script="runtime_speedup.py",
            arguments="--speeds 1 1 2 4 --batches 2 2 4 8",
            limit_seconds=600, needs=("torch",),
            figures=(
                at_least("even_of_uneven", "even split, of uneven", 1.95, "x",
                         "aim; the limit is 2", clock=True),
                at_least("fsdp2_of_uneven", "even FSDP2 with accumulation, of uneven", 2.1, "x",
                         AIM, clock=True),
            ),
        ),
        Benchmark(
            name="wire",
            about="How many bytes does a step send?",
            script="runtime_wire.py", quick="", limit_seconds=600, needs=("torch",),
            figures=(
                at_most("bytes_of_fsdp2_4", "bytes with 4 micro-batches", 0.30, "x", FSDP2),
                at_most("bytes_of_fsdp2_8", "bytes with 8 micro-batches", 0.17, "x", FSDP2),
                at_most("seconds_of_fsdp2_4", "seconds with 4 micro-batches", 1.0, "x", FSDP2,
                        clock=True),
                at_most("seconds_of_fsdp2_8", "seconds with 8 micro-batches", 1.0, "x", FSDP2,
                        clock=True),
            ),
        ),
        Benchmark(
            name="even_training",
            about="On equal devices, is our engine as fast and as small as FSDP2?",
            script="runtime_even.py", arguments="--layers 6 --width 192", limit_seconds=600,
            needs=("torch",),
            figures=tuple(
                figure
                for count in (1, 4)
                for figure in (
                    at_most(f"work_of_fsdp2_{count}", f"CPU time, {count} micro-batches", 1.05,
                            "x", FSDP2),
                    at_most(f"wall_of_fsdp2_{count}", f"clock time, {count} micro-batches", 1.05,
                            "x", FSDP2, clock=True),
                    at_most(f"peak_of_fsdp2_{count}", f"peak memory, {count} micro-batches", 1.0,
                            "x", FSDP2),
                )
            ),
        ),
        Benchmark(
            name="plain_training",
            about="Is a rank as fast as a plain loop, two as DDP, and faster than FSDP2?",
            script="runtime_plain.py", limit_seconds=900, needs=("torch",),
            figures=tuple(
                at_least(f"ours{word}_of_{name}", f"tokens/s {told}{by}", least, "x",
                         "aim, of the other in the same run", clock=not word)
                for name, told, least in (
                    ("plain_none", "of a plain loop, nothing recomputed", 0.95),
                    ("plain_full", "of a plain loop, all recomputed", 0.97),
                    ("ddp", "of DDP, two ranks", 0.95),
                    ("fsdp2_1", "of FSDP2, one micro-batch", 1.0),
                    ("fsdp2_4", "of FSDP2, four micro-batches", 1.3),
                )
                for word, by in (("", ""), ("_work", ", by processor time"))
            ),
        ),
        Benchmark(
            name="memory_uneven",
            about="Does a rank take the memory that the planner says? 1 to 70 billion parameters",
            script="runtime_memory.py", quick="--models llama-3.2-1b", limit_seconds=600,
            needs=("torch",),
            figures=(
                within("least_ratio", "estimate over engine, lowest", 0.95, 1.05, "x", AIM),
                within("most_ratio", "estimate over engine, highest", 0.95, 1.05, "x", AIM),
            ),
        ),
        Benchmark(
            name="memory_cells",
            about="The same where matrices and layers are split",
            script="runtime_cells_memory.py", limit_seconds=600, needs=("torch",),
            figures=(
                within("least_ratio", "estimate over engine, lowest", 0.95, 1.05, "x", AIM),
                within("most_ratio", "estimate over engine, highest", 0.95, 1.05, "x", AIM),
            ),
        ),
        Benchmark(
            name="collectives",
            about="Does the runtime choose the fastest form of an uneven collective?",
            script="runtime_collectives.py", quick="--ranks 2 --repeats 5", limit_seconds=600,
            needs=("torch",),
            figures=(
                shown("chosen_of_best", "seconds of the chosen form, of the fastest (median)", "x",
                      clock=True),
            ),
        ),
        Benchmark(
            name="runtime_every_plan",
            about="Does every plan in the planner's space run to the end under NCCL's rules?",
            script="runtime_every_plan.py", arguments="--most 20", limit_seconds=3600,
            needs=("torch",),
            figures=(
                shown("plans", "plans in the space of three small models on 2, 4 and 8 GPUs", ""),
                shown("run", "of which run, chosen by a seed", ""),
                within("problems", "hangs, errors, other losses", 0, 0, "", AIM),
            ),
        ),
    ),
)  # fmt: skip

SERVICE = Part(
    title="The running system",
    benchmarks=(
        Benchmark(
            name="serving",
            about="How quick is the running system?",
            script="serving.py", arguments="--times 3", limit_seconds=600, needs=("torch",),
            figures=(
                at_most("first_step_seconds", "from submission to the first training step", 10.0,
                        "s", AIM, clock=True),
                at_most("own_seconds", "of which Drystone's own part", 0.5, "s", AIM, clock=True),
                at_most("jobs_seconds", "`drystone jobs` with 10,000 waiting", 0.5, "s", AIM,
                        clock=True),
                shown("jobs_cpu_seconds", "of which CPU of the command", "s"),
                at_most("decision_seconds", "a decision with 10,000 waiting", 1.0, "s", AIM,
                        clock=True),
                at_most("why_seconds", "`drystone why` with 100 waiting", 0.5, "s", AIM,
                        clock=True),
            ),
        ),
        Benchmark(
            name="api_load",
            about="Does the service stay quick with 64 clients, 10,000 jobs, 500 of them live?",
            script="api_load.py", quick="--seconds 10 --clients 16 --jobs 1000 --live 50",
            limit_seconds=600,
            figures=(
                within("num_errors", "requests that failed", 0, 0, "", AIM),
                at_most("reads_p99_seconds", "reads, 99th percentile", 0.1, "ms", AIM, clock=True),
                at_most("submits_p99_seconds", "submissions, 99th percentile", 0.25, "ms", AIM,
                        clock=True),
                shown("cpu_seconds_per_request", "CPU a request, controller included", "ms"),
                at_most("live_core_share", "live updates for a browser, of a core", 0.1, "%", AIM),
            ),
        ),
        Benchmark(
            name="page_paint",
            about="How quick is the page with 10,000 jobs, 500 of them live?",
            script="page_paint.py", arguments="--times 2 --seconds 10", limit_seconds=600,
            needs=("playwright",),
            figures=(
                at_most("slowest_view_seconds", "slowest of eight views, painted (best of two)",
                        1.0, "s", AIM, clock=True),
                at_most("updates_core_share", "service while one browser watches, of a core", 0.1,
                        "%", AIM),
            ),
        ),
        Benchmark(
            name="agents_load",
            about="What do 1,000 nodes cost the controller?",
            script="agents_load.py", quick="--nodes 100 --seconds 5", limit_seconds=600,
            figures=(
                at_most("core_share", "of a core, CPU time at five looks a second", 0.5, "%", AIM),
            ),
        ),
        Benchmark(
            name="chaos",
            about="Is a job lost, or run twice, whatever is killed?",
            script="chaos.py", arguments="--runs 50", quick="--runs 5", limit_seconds=3600,
            figures=(
                shown("jobs", "jobs submitted", ""),
                within("missing", "jobs lost", 0, 0, "", AIM),
                within("not_done", "jobs not done in the end", 0, 0, "", AIM),
                within("problems", "jobs run twice, or with steps missing or repeated", 0, 0, "",
                       AIM),
                within("processes_left", "processes left", 0, 0, "", AIM),
            ),
        ),
    ),
)  # fmt: skip

ENGINES = Part(
    title="Past one machine",
    benchmarks=(
        Benchmark(
            name="ray_recovery",
            about="How soon is training back after a raylet was killed?",
            script="ray_recovery.py", arguments="--times 1 --jobs 8 --seconds 15",
            limit_seconds=600, needs=("torch", "ray"),
            figures=(
                at_most("restart_seconds", "from the kill to new processes, none left of the old",
                        10.0, "s", AIM, clock=True),
                shown("first_step_seconds", "from the kill to the next training step", "s",
                      clock=True),
                at_most("core_share_per_job", "controller for each running job, of a core", 0.01,
                        "%", AIM),
                at_most("agent_mib", "an agent's memory", 60.0, "MiB", AIM),
            ),
        ),
        Benchmark(
            name="slurm_recovery",
            about="How soon is training back after a slurmd was killed?",
            script="slurm_recovery.py", limit_seconds=600, needs=("torch",),
            figures=(
                at_most("restart_seconds", "from the kill to new processes", 10.0, "s", AIM,
                        clock=True),
                shown("first_step_seconds", "from the kill to the next training step", "s",
                      clock=True),
            ),
        ),
    ),
)  # fmt: skip

PARTS: Final = (
    ESTIMATES, PLANS, DECISIONS, POLICIES, MONEY, SIMULATOR, RUNTIME, SERVICE, ENGINES,
)  # fmt: skip
BENCHMARKS: Final = {one.name: one for part in PARTS for one in part.benchmarks}
