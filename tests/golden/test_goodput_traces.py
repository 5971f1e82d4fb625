"""Sia, Gavel, Tiresias and Pollux land near what their authors' simulators give, on the same data.

The data have no licence to ship: set DRYSTONE_DATA to a folder with peers/throughput.csv,
peers/sia_statistical_efficiency.csv, traces/trace_sia.csv and traces/trace_pollux.csv.

Figures of theirs: Sia 0.581 h and Gavel's policy 1.798 h on Saturn 1 (their simulator, unchanged);
Tiresias 3,469.7 s and Pollux 2,446.1 s on Pollux's workload 6. Where theirs learn speeds while jobs
run, ours are told them: Sia is 13 % and Pollux 6 % quicker for it. Tiresias needs no speeds: what
is left, 3.5 %, is that our jobs wait for as few nodes as their count needs.
"""

import os
import sys
from pathlib import Path

import pytest

from drystone.observe.metrics import RunReport
from drystone.observe.simulation import simulate_policy
from drystone.schedule.baselines import queues as least_attained
from drystone.units import HOUR_SECONDS

sys.path.insert(0, str(Path(__file__).resolve().parents[2] / "benchmarks"))

from goodput.scenarios import pollux_scenario, sia_scenario

pytestmark = pytest.mark.slow


@pytest.fixture(scope="module")
def data() -> Path:
    folder = os.environ.get("DRYSTONE_DATA", "")
    if not folder or not (Path(folder) / "traces" / "trace_sia.csv").exists():
        pytest.skip("Sia's data are not shipped: set DRYSTONE_DATA to the folder that has them")
    return Path(folder)


def check_all_done(report: RunReport) -> None:
    assert (report.num_done, report.num_unfinished, report.num_refused) == (160, 0, 0)


def test_sia_lands_near_its_authors_simulator(data: Path):
    pytest.importorskip("highspy")
    report = simulate_policy(sia_scenario(data, "saturn/workload-1"), "sia")[0]

    check_all_done(report)
    assert 0.83 * 0.581 <= report.mean_completion_seconds / HOUR_SECONDS <= 1.03 * 0.581
    assert report.num_restarts / report.num_jobs == pytest.approx(3.9, abs=1.0)


def test_gavel_lands_near_sias_simulator(data: Path):
    pytest.importorskip("highspy")
    scenario = sia_scenario(data, "saturn/workload-1", rigid=True, round_seconds=360.0)
    report = simulate_policy(scenario, "gavel-each-round")[0]

    check_all_done(report)
    assert report.mean_completion_seconds / HOUR_SECONDS == pytest.approx(1.798, rel=0.15)


def test_tiresias_lands_near_polluxs_simulator(data: Path, monkeypatch: pytest.MonkeyPatch):
    """Two queues, 16 GPU hours apart, as Pollux's authors set Tiresias."""
    monkeypatch.setattr(least_attained, "QUEUE_BOUNDS", (16 * HOUR_SECONDS,))
    scenario = pollux_scenario(data, "workloads/workload-6", rigid=True)
    report = simulate_policy(scenario, "least-attained")[0]

    check_all_done(report)
    assert report.mean_completion_seconds == pytest.approx(3469.7, rel=0.05)
    assert report.makespan_seconds == pytest.approx(78609, rel=0.03)


def test_pollux_lands_near_its_readme(data: Path):
    report = simulate_policy(pollux_scenario(data, "workloads/workload-6"), "pollux")[0]

    check_all_done(report)
    assert report.mean_completion_seconds == pytest.approx(2446.1, rel=0.10)
