"""Sources count, not rows, and each is judged by what is known without it."""

from dataclasses import dataclass, replace

import pytest

from drystone.observe.check.accuracy import MEMORY_TABLE, check_memory, estimate_run
from drystone.observe.check.left_out import left_out_errors, range_cover
from drystone.observe.check.runs import PublishedRun, load_runs


@dataclass(frozen=True)
class Reading:
    dataset: str
    unseen_error: float


def test_each_source_counts_once_however_many_rows_it_has():
    many = [Reading("a", 0.01)] * 1000
    few = [Reading("b", -0.3), Reading("c", 0.1), Reading("c", -0.2)]
    found = left_out_errors([*many, *few])

    assert [one.source for one in found.sources] == ["a", "b", "c"]
    assert found.median_abs_error == pytest.approx(0.15)  # of 0.01, 0.3 and 0.15
    assert found.p90_abs_error == pytest.approx(0.19)  # of 0.01, 0.3 and 0.19
    assert found.sources[1].bias == -0.3
    assert found.to_json()["by_source"]["a"]["evaluated"] == 1000


def test_no_sources_no_error():
    assert left_out_errors([]).median_abs_error == 0.0


def test_a_run_is_judged_by_constants_chosen_without_its_source():
    runs = [
        run
        for run in load_runs(MEMORY_TABLE, measure="memory")
        if isinstance(run, PublishedRun) and run.dataset == "galvatron"
    ]
    report = check_memory(runs)

    assert [run.estimated for run in report.runs] == [
        estimate_run(run, measure="memory")[0] for run in runs
    ]
    assert any(run.estimated != run.estimated_unseen for run in report.runs)
    # Of a source that nothing was chosen by, both are the same.
    stranger = check_memory([replace(runs[0], dataset="stranger")]).runs[0]
    assert stranger.estimated == stranger.estimated_unseen


def test_the_json_says_both():
    run = next(
        run for run in load_runs(MEMORY_TABLE, measure="memory") if isinstance(run, PublishedRun)
    )
    shape = check_memory([run]).to_json()

    assert shape["left_out"]["all full"]["num_sources"] == 1
    assert set(shape["left_out"]["all full"]["by_source"]) == {run.dataset}
    assert {"estimated_unseen", "unseen_error"} <= shape["results"][0].keys()


def test_the_range_is_judged_over_sources_too():
    many = [("a", 1.0, (0.5, 2.0))] * 99
    few = [("b", 3.0, (0.5, 2.0)), ("b", 0.1, (0.5, 2.0))]
    found = range_cover([*many, *few])

    assert (found.num_sources, found.inside, found.above) == (2, 0.5, 0.25)
    assert range_cover([]).num_sources == 0
