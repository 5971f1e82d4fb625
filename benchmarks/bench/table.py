"""Which benchmarks there are: the command, what is read from its output, the range, its source.

The one place where ranges stand. A source says where a range comes from: `aim` is what the project
set out to reach; figures of others are named. A figure that lies outside stays in the table.
"""

from __future__ import annotations

from typing import Final

from bench.spec import Benchmark, Part, at_least, at_most, shown, within

AIM: Final = "aim"
SIA_AND_GAVEL: Final = "aim: below the best of Sia, Gavel and Pollux on every trace"
DECISION_DOCS: Final = "docs/simulate.md, Time of a decision"
PACE_DOCS: Final = "docs/simulate.md, Pace"

ESTIMATES = Part(
    title="Estimates",
    benchmarks=(
        Benchmark(
            name="estimator_accuracy",
            about="How right are memory and speed against published runs?",
            script="estimator_accuracy.py", quick="", limit_seconds=180,
            figures=(
                at_most("memory_all_full_median_error", "memory, full training: median error",
                        0.06, "%", AIM),
                at_most("memory_all_full_p90_error", "memory, full training: 90th percentile",
                        0.20, "%", AIM),
                at_most("memory_all_adapters_median_error", "memory, LoRA and QLoRA: median error",
                        0.10, "%", AIM),
                at_least("oom_caught", "runs out of memory that are caught", 0.90, "%", AIM),
                at_least("fits_accepted", "runs that fitted and are accepted", 0.95, "%", AIM),
                at_most("speed_dense_full_median_error", "speed, dense full training: median error",
                        0.10, "%", AIM),
                at_most("speed_dense_full_p90_error", "speed, dense full training: 90th percentile",
                        0.30, "%", AIM),
            ),
        ),
        Benchmark(
            name="left_out",
            about="How right on sources that were left out of all choosing?",
            script="left_out.py", quick="", limit_seconds=180,
            figures=(
                at_most("memory_all_full_median", "memory, full training: median over sources",
                        0.08, "%", AIM),
                at_most("memory_all_full_p90", "memory, full training: 90th percentile",
                        0.25, "%", AIM),
                at_most("memory_all_adapters_median", "memory, LoRA and QLoRA: median",
                        0.10, "%", AIM),
                at_most("memory_all_adapters_p90", "memory, LoRA and QLoRA: 90th percentile",
                        0.30, "%", AIM),
                at_most("speed_dense_full_median", "speed, dense: median", 0.09, "%", AIM),
                at_most("speed_dense_full_p90", "speed, dense: 90th percentile", 0.25, "%", AIM),
                at_most("speed_experts_above_5B_median", "speed, experts above 5 B: median",
                        0.15, "%", AIM),
                at_most("speed_experts_above_5B_p90", "speed, experts above 5 B: 90th percentile",
                        0.40, "%", AIM),
                at_least("range_inside", "readings inside the 80 % range", 0.75, "%", AIM),
                at_most("range_above", "readings above it", 0.15, "%", AIM),
                at_most("refused_dense", "dense runs that ran and are refused", 0.03, "%", AIM),
                at_most("refused_experts", "runs with experts that ran and are refused",
                        0.08, "%", AIM),
            ),
        ),
        Benchmark(
            name="published_configs",
            about="Does the planner take, or beat, what NVIDIA publishes as its best?",
            script="published_configs.py", quick="", limit_seconds=180,
            figures=(
                shown("configurations", "pairs of model and GPU type", ""),
                at_least("accepted", "accepted", 12 / 14, "%", AIM),
                at_least("planner_as_fast", "the planner's own choice is as fast", 12 / 14, "%",
                         AIM),
                at_most("median_error", "speed of the published one, left out: median error",
                        0.20, "%", AIM),
            ),
        ),
        Benchmark(
            name="leaderboard",
            about="Who is nearer to published runs: Drystone, or what people use instead?",
            script="leaderboard.py", quick="", limit_seconds=600,
            figures=(
                shown("memory_sources", "memory of full training: sources", ""),
                shown("memory_drystone_wins", "of which Drystone is nearest on", ""),
                shown("memory_drystone_median", "Drystone, left out: median error", "%"),
                shown("memory_megatron_median", "Megatron's report: median error", "%"),
                shown("memory_deepspeed_median", "DeepSpeed's estimators: median error", "%"),
                shown("memory_accelerate_median", "accelerate's: median error", "%"),
                shown("memory_frenzy_median", "Frenzy's formula: median error", "%"),
                shown("speed_sources", "speed of full training: sources", ""),
                shown("speed_drystone_wins", "of which Drystone is nearest on", ""),
                shown("speed_drystone_median", "Drystone, left out: median error", "%"),
                shown("speed_constant_median", "40 % of the peak, always: median error", "%"),
            ),
        ),
        Benchmark(
            name="pooled_corrections",
            about="How much do readings of one's own help, at a site that nobody has seen?",
            script="pooled_corrections.py", quick="", limit_seconds=300,
            figures=(
                shown("speed_error_before_10", "speed: median error", "%"),
                shown("speed_error_after_10", "the same after 10 readings", "%"),
                shown("memory_error_before_10", "memory: median error", "%"),
                shown("memory_error_after_10", "the same after 10 readings", "%"),
            ),
        ),
        Benchmark(
            name="arena_accuracy",
            about="How right is the best Cell against Arena's measured optima?",
            script="arena_accuracy.py", quick="", limit_seconds=180,
            figures=(
                at_most("median_error", "median error over 236 rows", 0.15, "%", AIM),
                shown("held_out_median_error", "median error over rows not looked at before", "%"),
                at_least("pairs_right", "pairs of GPU type and count in the right order",
                         0.90, "%", AIM),
            ),
        ),
        Benchmark(
            name="residuals",
            about="Do the shipped ranges of memory estimates fit the table that ships?",
            script="learn_residuals.py", quick="", limit_seconds=120,
            figures=(
                at_most("factor_difference", "largest difference of a factor", 0.001, "x",
                        "the rounding of the shipped file"),
                within("run_difference", "difference in runs", 0, 0, "", "the shipped file"),
            ),
        ),
        Benchmark(
            name="estimate_pace",
            about="How fast are estimates?",
            script="estimate_pace.py", quick="", limit_seconds=120,
            figures=(
                at_most("one_seconds", "one estimate of speed", 0.001, "ms", AIM, clock=True),
                at_least("layouts_per_second", "layouts a second, as an array", 100_000, "/s", AIM,
                         clock=True),
            ),
        ),
        Benchmark(
            name="trace_8b",
            about="How long does tracing a module of 8 billion parameters take, how right is it?",
            script="trace_8b.py", arguments="--reference", limit_seconds=420,
            needs=("torch", "transformers"),
            figures=(
                at_most("seconds", "a fresh process, torch imported, best of 5", 5.0, "s", AIM,
                        clock=True),
                at_most("error", "peak against torch's MemTracker", 0.03, "%", AIM),
                at_most("needed_bytes", "memory that tracing needs itself", 1.5e9, "GB", AIM),
            ),
        ),
    ),
)  # fmt: skip

PLANS = Part(
    title="Plans",
    benchmarks=(
        Benchmark(
            name="plan_time",
            about="How long does it take to plan one job, and to list its options?",
            script="plan.py", quick="", limit_seconds=180,
            figures=(
                at_most("plan_seconds", "Llama 70B on 128 GPUs of 4 types, mixed ways too, cold",
                        0.5, "ms", "aim; reported on 128 A100: Sailor under 1 s, FlashFlex 3 s, "
                        "AMP 14 s", clock=True),
                shown("plan_cpu_seconds", "of CPU", "ms"),
                at_most("options_seconds", "options of one job, 4 types up to 64 GPUs each, cold",
                        0.1, "ms", AIM, clock=True),
                shown("options_cpu_seconds", "of CPU", "ms"),
                at_most("uneven_seconds", "uneven shares over 1,024 GPUs of 8 types", 1.0, "ms",
                        AIM, clock=True),
                at_most("correction_seconds", "options again after a measurement", 0.01, "ms", AIM,
                        clock=True),
            ),
        ),
        Benchmark(
            name="assignment",
            about="How long does it take to divide a batch over unlike GPUs?",
            script="assignment.py", limit_seconds=240,
            figures=(
                at_most("gpus_64_batch_512_seconds", "64 GPUs of 5 types, batch 512", 0.05, "ms",
                        AIM, clock=True),
                at_most("gpus_1024_batch_4096_seconds", "1,024 GPUs of 8 types, batch 4,096", 1.0,
                        "ms", AIM, clock=True),
                shown("gpus_1024_batch_16384_seconds", "1,024 GPUs of 8 types, batch 16,384", "ms",
                      clock=True),
            ),
        ),
        Benchmark(
            name="help_time",
            about="How long does `drystone --help` take?",
            script="help_time.py", quick="", limit_seconds=60,
            figures=(
                at_most("help_seconds", "best of ten", 0.3, "s", AIM, clock=True),
                shown("help_cpu_seconds", "of CPU", "s"),
                shown("times_python", "of starting Python at all", "x", clock=True),
            ),
        ),
    ),
)  # fmt: skip

DECISIONS = Part(
    title="Decisions",
    benchmarks=(
        Benchmark(
            name="decision_growth",
            about="How does the time of a decision grow with the cluster?",
            script="decision_growth.py", arguments="--repeats 3", quick="--repeats 1",
            limit_seconds=240,
            figures=(
                at_most("first_exponent", "exponent of the first decision, from 1,000 GPUs on",
                        1.25, "power", "aim: near linear, which is 1"),
                at_most("next_exponent", "exponent of later decisions", 1.25, "power",
                        "aim: near linear, which is 1"),
            ),
        ),
        Benchmark(
            name="prices",
            about="How long does a decision take, and how far is it from the best?",
            script="prices.py", limit_seconds=400, needs=("highspy",),
            figures=(
                at_most("gpus_1280_seconds", "1,280 GPUs, 150 jobs (CPU)", 0.020, "ms", AIM),
                at_most("gpus_10240_seconds", "10,240 GPUs, 2,000 jobs (CPU)", 1.0, "s", AIM),
                at_most("gpus_102400_seconds", "102,400 GPUs, 20,000 jobs (CPU)", 15.0, "s", AIM),
                at_most("below_highs", "value below HiGHS's integer programme, 100 to 2,000 jobs",
                        0.01, "%", AIM),
            ),
        ),
        Benchmark(
            name="decision_time",
            about="How long does each policy take for the same decision?",
            script="decision_time.py",
            arguments="--runner prices --policies prices,cells,cells-plain,sia --snapshots 40 "
            "--most-seconds 90",
            limit_seconds=400, needs=("highspy",),
            figures=(
                at_most("prices_seconds", "`prices`, 1,280 GPUs and about 150 jobs (CPU, median)",
                        0.020, "ms", AIM),
                at_least("sia_times_prices", "Sia's integer programme, of `prices`", 20, "x", AIM),
                at_least("cells_times_prices", "`cells`, of `prices`", 100, "x", AIM,
                         known=DECISION_DOCS),
                at_least("cells-plain_times_prices", "`cells` as published, one placement at a "
                         "time, of `prices`", 100, "x", AIM, known=DECISION_DOCS),
                shown("prices_in_run_seconds", "`prices` at the same moments along its own run, "
                      "where one decision follows the other", "ms"),
                shown("cells-plain_times_in_run", "`cells` as published, of that", "x"),
                shown("stored_crius_times_prices", "4.8 s, the mean of the run that Crius's "
                      "authors stored (their code, their machine), of `prices` here", "x"),
            ),
        ),
    ),
)  # fmt: skip

POLICIES = Part(
    title="Policies on traces",
    benchmarks=(
        Benchmark(
            name="policies",
            about="How early do jobs finish on Arena's traces, 1,280 GPUs of four types?",
            script="policies.py", quick="--traces pai,helios --policies prices,cells,gavel,fifo",
            limit_seconds=600, needs=("highspy",),
            figures=(
                at_most("pai_to_bound", "PAI: `prices` to the lower bound", 1.15, "x", AIM),
                at_most("helios_to_bound", "Helios: `prices` to the lower bound", 1.15, "x", AIM),
                shown("philly_to_bound", "Philly, 986 jobs: `prices` to the lower bound", "x"),
                *(
                    at_most(f"{trace}_{kind}prices_of_best_other", f"{title}: {words}", 1.0, "x",
                            "aim: below every other policy")
                    for trace, title in (("pai", "PAI"), ("helios", "Helios"), ("philly", "Philly"))
                    for kind, words in (
                        ("", "`prices`, of the best other"),
                        ("blind_", "`prices` told no lengths and speeds 20 % off, of the best "
                         "other told everything"),
                    )
                ),
            ),
        ),
        Benchmark(
            name="sia",
            about="How do policies compare on Sia's traces, 64 GPUs of three types?",
            script="sia.py",
            arguments="--data {data} --policy prices,sia,pollux --workload "
            "saturn/workload-1,saturn/workload-2,philly/workload-1",
            limit_seconds=600, needs=("highspy",),
            figures=(
                at_most("worst_of_best_other", "`prices`, of the best other, on the worst workload",
                        1.0, "x", SIA_AND_GAVEL),
                at_most("mean_of_best_other", "`prices`, of the best other, on average", 0.9, "x",
                        "aim: 10 % below"),
            ),
        ),
        Benchmark(
            name="pollux",
            about="How do policies compare on Pollux's workload 6, 64 T4?",
            script="pollux.py", arguments="--data {data} --policy prices,pollux",
            limit_seconds=300,
            figures=(
                within("pollux_seconds", "mean completion under Pollux", 2446.1 * 0.85,
                       2446.1 * 1.15, "s", "the authors' simulator gives 2,446 s"),
                shown("prices_seconds", "mean completion under `prices`", "s"),
            ),
        ),
        Benchmark(
            name="decisions",
            about="Do decisions stay good when little is known? Generated loads, lengths not told",
            script="decisions.py",
            arguments="--loads bursts,stream,equal,wide,whole,heavy --told known,unknown "
            "--policy prices,sia-freed,cells",
            limit_seconds=1800, needs=("highspy",),
            figures=tuple(
                shown(f"{load} {told} {policy} hours", f"{load}, lengths {told}: `{policy}`", "h")
                for load in ("bursts", "stream", "heavy", "wide", "whole")
                for told in ("known", "unknown")
                for policy in ("prices", "sia-freed", "cells")
            ),
        ),
        Benchmark(
            name="frenzy",
            about="What becomes of Frenzy's two claims, against Sia's programme?",
            script="frenzy.py", limit_seconds=900, needs=("highspy",),
            figures=(
                at_most("largest_overhead_share", "overhead of a decision, of Sia's", 0.1, "x",
                        "arXiv:2412.14479"),
                shown("best_completion_change", "mean completion against Sia's, best load", "%"),
                shown("worst_completion_change", "the same, worst load", "%"),
            ),
        ),
    ),
)  # fmt: skip

MONEY = Part(
    title="Money",
    benchmarks=(
        Benchmark(
            name="frontier_time",
            about="How long does it take to trace the frontier of a budget?",
            script="budget.py", quick="", limit_seconds=180,
            figures=(
                at_most("frontier_seconds", "1,000 classes of 100 options", 0.2, "ms", AIM,
                        clock=True),
            ),
        ),
        Benchmark(
            name="budget_llm",
            about="How much earlier does `budget` finish than Pollux that rents, at equal money?",
            script="budget_llm.py", limit_seconds=1200,
            figures=(
                at_least("least_ratio", "LLM jobs: times earlier, worst of three utilities", 1.6,
                         "x", "aim; BOA's authors found 1.6 on their workload"),
                at_most("spend_error", "spend against the budget, worst of three", 0.03, "%", AIM,
                        known="docs/simulate.md, Money"),
            ),
        ),
        Benchmark(
            name="pollux_rented",
            about="The same on Pollux's jobs, restarts as BOA's authors measured them on AWS",
            script="pollux.py", arguments="--data {data} --rented --aws", limit_seconds=600,
            figures=(
                at_least("least_ratio", "times earlier, worst of three utilities", 1.6, "x",
                         "aim; BOA's authors found 1.6"),
                shown("ideal_ratio", "without any limit on money, on nodes that come at once", "x"),
            ),
        ),
        Benchmark(
            name="pollux_rented_sia",
            about="The same with the shorter restarts that Sia measured",
            script="pollux.py", arguments="--data {data} --rented", limit_seconds=600,
            figures=(
                at_least("least_ratio", "times earlier, worst of three utilities", 1.6, "x",
                         "aim", known="docs/simulate.md, Money"),
                shown("ideal_ratio", "without any limit on money, on nodes that come at once", "x"),
            ),
        ),
        Benchmark(
            name="money",
            about="How early does `budget` finish jobs, against everybody else at equal money?",
            script="money.py", arguments="--seeds 3", limit_seconds=3600,
            figures=(
                at_most("worst_of_best", "`budget`, of the best other, at worst", 1.05, "x", AIM),
                at_most("median_of_best", "the same, in the median", 0.85, "x", AIM),
                at_most("mean_of_steady", "of the best constant multiplier, in the mean", 1.1, "x",
                        AIM),
                at_most("worst_of_steady", "the same, at worst", 1.2, "x", AIM),
                within("num_not_all_done", "runs that left jobs undone", 0, 0, "", AIM),
            ),
        ),
        Benchmark(
            name="spot",
            about="What does a job with a deadline cost on spot nodes, against the optimum?",
            script="spot.py", quick="--quick", limit_seconds=300,
            figures=(
                within("num_missed", "deadlines missed", 0, 0, "", AIM),
                at_most("published_of_optimum", "SkyNomad's setting: of the offline optimum", 1.12,
                        "x", "aim; its authors' policy reaches 1.117"),
                shown("published_dollars", "the same in dollars; SkyNomad $41.73", "$"),
                at_most("late_of_optimum", "windows that nothing was chosen on: of the optimum",
                        1.12, "x", AIM),
                at_most("late_of_uniform", "the same windows: of uniform progress", 1.0, "x", AIM),
                shown("late_of_best_rule", "of the better of two rules, case by case", "x"),
                shown("late_worst_of_optimum", "of the optimum, worst case", "x"),
            ),
        ),
        Benchmark(
            name="renting_live",
            about="Does renting keep its budget with real processes? Clock 60 times as fast",
            script="renting_live.py", arguments="--speed 60 --hours 10 --warm-up 2",
            limit_seconds=1200,
            figures=(
                at_most("spend_error", "mean spend after warm-up against the budget", 0.05, "%",
                        AIM, clock=True, known="docs/renting.md"),
                shown("spend_beyond_budget", "the same with its sign", "%"),
                shown("cheapest_of_budget", "every job on one GPU would cost, of the budget", "x"),
                shown("fastest_of_budget", "every job on four, of the budget", "x"),
                at_most("highest_of_hard_cap", "highest rate, of the hard cap", 1.0, "x", AIM),
                within("num_unreleased", "rented nodes not given back", 0, 0, "", AIM),
                within("ledger_difference_dollars", "ledger against the provider's bill", 0, 0,
                       "$", AIM),
                at_least("done_share", "jobs that are done", 1.0, "x", AIM),
            ),
        ),
    ),
)  # fmt: skip

SIMULATOR = Part(
    title="Simulator",
    benchmarks=(
        Benchmark(
            name="simulator",
            about="How many events a second does the simulator manage, policies left out?",
            script="simulator.py", quick="--repeat 1", limit_seconds=180,
            figures=(
                at_least("events_per_cpu_second", "events a CPU second, best of three", 200_000,
                         "/s", AIM, known=PACE_DOCS),
            ),
        ),
        Benchmark(
            name="simulator_philly",
            about="How long do the 82,247 jobs of the Philly trace take on 2,500 GPUs?",
            script="simulator.py",
            arguments="--repeat 1 --philly benchmarks/data/philly_jobs.csv.xz",
            limit_seconds=300,
            figures=(
                at_most("philly_seconds", "by the clock, with reading the file", 60.0, "s", AIM,
                        clock=True),
                shown("philly_cpu_seconds", "of CPU", "s"),
            ),
        ),
    ),
)  # fmt: skip
