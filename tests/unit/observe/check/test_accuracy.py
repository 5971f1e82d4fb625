"""Estimates against published runs: what is compared with what, and how it is counted."""

import json
from dataclasses import replace

import pytest

from drystone.describe.catalogue import find_gpu
from drystone.describe.layout import Layouts
from drystone.describe.recipe import Loss, Precision, Tuning
from drystone.estimate.memory.peak import estimate_memory
from drystone.observe.check.accuracy import (
    MEMORY_TABLE,
    SPEED_TABLE,
    CheckedRun,
    Errors,
    FitCounts,
    check_memory,
    check_speed,
    dataset_and_kind,
    reading_of,
)
from drystone.observe.check.runs import PublishedRun, SkippedRun, load_runs
from drystone.units import GiB

SKIPPED = SkippedRun(run_id="b-0009", dataset="b", reason="no memory reading")


@pytest.fixture(scope="module")
def run() -> PublishedRun:
    runs = load_runs(MEMORY_TABLE, measure="memory")
    first = next(one for one in runs if isinstance(one, PublishedRun))
    return replace(first, run_id="a-0001", dataset="a", gpu_name="H100-80GB-SXM", kind="reserved")


def checked(measured: float, *, second: bool = False, group: str = "dense full") -> CheckedRun:
    return CheckedRun(
        run_id="a-0001",
        dataset="a",
        group=group,
        kind="allocated",
        family="torch",
        estimated=1.0,
        estimated_unseen=1.0,
        measured=measured,
        is_second_reading=second,
    )


def test_the_error_is_relative_to_the_measurement():
    assert checked(0.5).error == 1.0
    assert checked(2.0).error == -0.5


def test_a_summary_has_median_and_tail_and_sign():
    found = Errors.of([checked(1 / (1 + error)) for error in (-0.3, -0.2, -0.1, 0.0, 0.4)])

    assert found.evaluated == 5
    assert found.median_abs_error == pytest.approx(0.2)
    assert found.p90_abs_error == pytest.approx(0.36)
    assert found.bias == pytest.approx(-0.1)
    assert Errors.of([]).evaluated == 0


@pytest.mark.parametrize(
    ("kind", "reading"),
    [
        ("allocated", "allocated"),
        ("allocated (presumed)", "allocated"),
        ("reserved", "reserved"),
        ("nvidia-smi", "device"),
        ("unstated (GB)", "device"),
    ],
)
def test_like_is_compared_with_like(run, kind, reading):
    report = check_memory([replace(run, kind=kind)])
    layouts = Layouts.of([run.layout])
    found = report.runs[0]
    estimate = estimate_memory(run.model, run.recipe, layouts, gpu=find_gpu(run.gpu_name))
    assert found.estimated == getattr(estimate, reading).item()
    assert found.measured == run.measured_memory_bytes


def test_a_run_read_by_two_tools_counts_once(run):
    second = replace(run, kind="nvidia-smi", is_second_reading=True)
    report = check_memory([run, second])
    shape = report.to_json()

    assert shape["rows"] == 2
    assert shape["evaluated"] == 1
    assert shape["by_dataset"]["a"]["evaluated"] == 2
    assert shape["by_dataset_kind"]["a, full, nvidia-smi"]["evaluated"] == 1
    assert shape["oom"]["fits_accepted"] + shape["oom"]["fits_refused"] == 1


def test_a_run_that_failed_is_caught_or_missed(run):
    failed = replace(run, ran_out_of_memory=True, measured_memory_bytes=0.0, kind="oom-boundary")
    # The same run with a hundred times the tokens cannot fit.
    huge = replace(run.layout, micro_batch=100 * run.layout.micro_batch)
    report = check_memory([failed, replace(failed, layout=huge), run, replace(run, layout=huge)])

    assert report.fit_counts.missed == 1
    assert report.fit_counts.caught == 1
    assert report.fit_counts.fits_accepted == 1
    assert report.fit_counts.fits_refused == 1
    assert report.fit_counts.warned == 2  # the smaller one is near what the GPU has
    assert report.fit_counts.by_group == {"dense full": (1, 2)}
    assert len(report.runs) == 2  # a failure has no reading to compare


def test_a_gpu_nobody_knows_is_compared_but_not_asked_whether_it_fits(run):
    report = check_memory([replace(run, gpu_name="unstated")])

    assert len(report.runs) == 1
    assert report.fit_counts == FitCounts()


def test_a_reading_of_the_last_stage_is_compared_with_the_last_stage(run):
    layout = replace(run.layout, pp=4, micro_batch=1)
    recipe = replace(run.recipe, global_batch=64, loss=Loss.CHUNKED)
    run = replace(run, layout=layout, recipe=recipe)
    hungriest, last = (
        check_memory([replace(run, reports_last_stage=is_last)]).runs[0].estimated
        for is_last in (False, True)
    )
    gpu = find_gpu(run.gpu_name)
    estimate = estimate_memory(run.model, recipe, Layouts.of([layout]), stage=[3], gpu=gpu)

    assert last == estimate.reserved.item()
    assert last < hungriest


def test_groups_keep_full_training_and_adapters_apart(run):
    lora = replace(run, recipe=replace(run.recipe, tuning=Tuning.LORA))
    shape = check_memory([run, lora, SKIPPED]).to_json()

    assert shape["by_group"].keys() == {"dense full", "lora", "all full", "all adapters"}
    assert dataset_and_kind(checked(1.0, group="qlora")) == "a, lora, allocated"


def test_skipped_rows_are_listed_with_their_reason(run):
    shape = check_memory(iter([SKIPPED, run])).to_json()

    assert shape["rows"] == 2
    assert shape["skipped"] == [{"run_id": "b-0009", "dataset": "b", "reason": "no memory reading"}]


def test_the_json_has_the_documented_keys(run):
    shape = json.loads(json.dumps(check_memory([run, SKIPPED]).to_json()))

    assert {
        "rows", "evaluated", "skipped", "median_abs_error", "p90_abs_error", "bias", "by_dataset",
        "oom",
    } <= shape.keys()  # fmt: skip
    assert shape["oom"].keys() == {
        "caught", "missed", "warned", "fits_accepted", "fits_refused", "by_group",
    }  # fmt: skip
    assert shape["range"].keys() == {"num_sources", "inside", "above"}
    assert shape["by_dataset"]["a"].keys() == {
        "evaluated", "median_abs_error", "p90_abs_error", "bias",
    }  # fmt: skip
    assert shape["results"][0]["error"] == pytest.approx(
        shape["results"][0]["estimated"] / (run.measured_memory_bytes) - 1
    )
    assert shape["results"][0]["measured"] > GiB


def test_speed_is_judged_where_the_gpu_is_known():
    runs = [one for one in load_runs(SPEED_TABLE, measure="speed") if isinstance(one, PublishedRun)]
    run = runs[0]
    report = check_speed([run, replace(run, gpu_name=""), SKIPPED])

    assert [one.run_id for one in report.runs] == [run.run_id]
    assert report.runs[0].measured == run.measured_tokens_per_second_per_gpu
    assert [one.reason for one in report.skipped] == ["the GPU is not stated", SKIPPED.reason]
    assert report.to_json()["measure"] == "speed"
    assert report.fit_counts.fits_accepted + report.fit_counts.fits_refused == 1


@pytest.mark.parametrize(
    ("kind", "compared"),
    [
        ("allocated", "allocated"),
        ("max_memory_allocated", "allocated"),
        ("torch reserved", "reserved"),
        ("reserved (max over ranks, allocated is less)", "reserved"),
        ("nvidia-smi", "device"),
        ("unstated (GB)", "device"),
        ("", "device"),
    ],
)
def test_a_reading_is_compared_with_what_it_is(kind: str, compared: str) -> None:
    assert reading_of(kind) == compared


def test_a_row_that_no_estimate_can_answer_is_skipped_with_the_reason_and_the_rest_goes_on(run):
    narrow = replace(run.recipe, precision=Precision.MXFP8_MIXED)  # no H100 multiplies in it
    odd = replace(run, run_id="a-0002", recipe=narrow)
    report = check_speed([odd, replace(run, measured_tokens_per_second_per_gpu=1000.0)])

    assert [(one.run_id, "mxfp8" in one.reason) for one in report.skipped] == [("a-0002", True)]
    assert len(report.runs) == report.fit_counts.fits_accepted + report.fit_counts.fits_refused == 1
