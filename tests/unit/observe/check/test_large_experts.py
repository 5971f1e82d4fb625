"""Published runs of large mixtures of experts, judged by themselves."""

from drystone.observe.check.accuracy import LARGE_EXPERTS, SPEED_TABLE, check_speed
from drystone.observe.check.runs import load_runs


def test_tests_of_a_framework_are_no_large_mixtures_of_experts():
    wanted = ("automodel", "mcoregold")
    runs = [run for run in load_runs(SPEED_TABLE, measure="speed") if run.dataset in wanted]
    report = check_speed(runs)
    (source,) = report.left_out_by_group()[LARGE_EXPERTS].sources

    assert source.source == "automodel"
    assert source.evaluated == 6
    refused, number = report.fit_counts.by_group[LARGE_EXPERTS]
    assert number == 6
    assert refused <= report.fit_counts.by_group["expert full"][0]
