"""How right the memory estimates are on runs that other people made and published."""

from itertools import groupby

import pytest

from drystone.observe.check.accuracy import (
    MEMORY_TABLE,
    CheckedRun,
    CheckReport,
    Errors,
    check_memory,
)
from drystone.observe.check.runs import load_runs

pytestmark = pytest.mark.slow

# Datasets whose numbers a machine wrote, with the configuration beside them (trust A and A-).
TRUSTED = {"mcoregold", "fmsaccel", "galvatron", "vocabpp", "peft"}


@pytest.fixture(scope="module")
def report() -> CheckReport:
    return check_memory(load_runs(MEMORY_TABLE, measure="memory"))


def errors(report: CheckReport, *groups: str) -> Errors:
    return Errors.of([run for run in report.first_readings if run.group in groups])


def test_most_rows_are_judged(report):
    assert len(report.runs) > 1500
    assert len(report.skipped) / report.num_rows < 0.1


def test_full_training(report):
    found = errors(report, "dense full", "expert full")

    assert found.evaluated > 1000
    assert found.median_abs_error <= 0.06
    assert found.p90_abs_error <= 0.20
    assert abs(found.bias) <= 0.03


@pytest.mark.parametrize("group", ["dense full", "expert full"])
def test_dense_models_and_experts_alike(report, group):
    found = errors(report, group)

    assert found.evaluated > 100
    assert found.median_abs_error <= 0.06
    assert found.p90_abs_error <= 0.20


@pytest.mark.parametrize("group", ["lora", "qlora"])
def test_adapters(report, group):
    found = errors(report, group)

    assert found.evaluated > 100
    assert found.median_abs_error <= 0.10


def test_every_trusted_dataset_by_kind_of_reading(report):
    def key(run: CheckedRun) -> tuple[str, bool, str]:
        return run.dataset, run.group.endswith("full"), run.kind

    runs = sorted((run for run in report.runs if run.dataset in TRUSTED), key=key)
    found = {name: Errors.of(list(group)) for name, group in groupby(runs, key=key)}

    assert {name for name, _, _ in found} == TRUSTED
    assert {name: one.median_abs_error for name, one in found.items()} == {
        name: one.median_abs_error for name, one in found.items() if one.median_abs_error <= 0.10
    }


def test_runs_that_fail_are_refused_or_warned_of_and_runs_that_fit_accepted(report):
    counts = report.fit_counts

    assert counts.caught + counts.missed > 100
    assert counts.caught / (counts.caught + counts.missed) >= 0.80
    assert counts.warned / (counts.caught + counts.missed) >= 0.95
    refused = {group: few / number for group, (few, number) in counts.by_group.items()}
    assert refused["dense full"] <= 0.03
    assert refused["expert full"] <= 0.08


def test_sources_left_out_of_all_choosing(report):
    found = report.left_out_by_group()

    assert len(found["all full"].sources) >= 12
    assert found["all full"].median_abs_error <= 0.10
    assert found["all full"].p90_abs_error <= 0.25
    assert found["all adapters"].median_abs_error <= 0.10
    assert found["all adapters"].p90_abs_error <= 0.30


def test_four_of_five_readings_of_a_left_out_source_lie_inside_the_range(report):
    cover = report.range_cover()

    assert cover.inside >= 0.75
    assert cover.above <= 0.15
