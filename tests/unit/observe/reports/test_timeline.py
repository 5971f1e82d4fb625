import sys
from collections import defaultdict
from dataclasses import replace
from itertools import pairwise
from pathlib import Path

sys.path.insert(0, str(Path(__file__).parents[2] / "schedule"))
from tiny import job, node, option_set

from drystone.observe.reports.series import render_timeline
from drystone.observe.simulation import Scenario, simulate_policy
from drystone.run.simulate.faults import FaultSpec

NODES = (node("a0"), node("a1"), node("b0", "B", 2))
OPTIONS = option_set(([1, 0], 1.0), ([4, 0], 3.0), ([0, 2], 2.0))


def test_no_gpu_has_two_bars_at_once_and_bars_add_up_to_the_use():
    jobs = tuple(replace(job(f"j{i}", 50.0 * (i + 1)), submit_seconds=7.0 * i) for i in range(20))
    scenario = Scenario(
        jobs=jobs,
        nodes=NODES,
        options_of=lambda _: OPTIONS,
        faults=FaultSpec(seed=1, node_losses_per_hour=20, repair_seconds=50),
    )
    report, log = simulate_policy(scenario, "prices")

    shown = render_timeline(log, NODES, report.makespan_seconds)["traceEvents"]

    bars = defaultdict(list)
    for one in shown:
        if one["ph"] == "X":
            bars[one["tid"]].append((one["ts"], one["ts"] + one["dur"]))
    assert set(bars) <= set(range(10))
    for track in bars.values():
        track.sort()
        assert all(a[1] <= b[0] + 1e-3 for a, b in pairwise(track))
    held = sum(until - start for track in bars.values() for start, until in track) / 1e6
    used = sum(report.utilisation[gpu] * count for gpu, count in (("A", 8), ("B", 2)))
    assert abs(held - used * report.makespan_seconds) < 1e-3
