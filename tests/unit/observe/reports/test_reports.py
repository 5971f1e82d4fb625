"""What a comparison says: fairness, money, use, what was told, series and the page."""

import json
import re
import sys
from dataclasses import replace
from pathlib import Path

import pytest

sys.path.insert(0, str(Path(__file__).parents[2] / "schedule"))
from tiny import job, node, option_set

from drystone.describe.market import Offer
from drystone.describe.option import OptionSet
from drystone.observe.reports.page import headline, render_page, report_lines
from drystone.observe.reports.series import (
    completion_curve,
    gpu_tiles,
    price_curves,
    spend_curve,
    use_by_type,
    waiting_jobs,
)
from drystone.observe.simulation import (
    Information,
    Scenario,
    policy_information,
    reachable_nodes,
    run_policy,
    statements,
)
from drystone.run.simulate.faults import FaultSpec

OPTIONS = option_set(([2, 0], 2.0), ([4, 0], 4.0), ([0, 4], 1.0))
JOBS = tuple(
    replace(
        job(f"j{i}", 400.0, requested_gpu="A", requested_count=4),
        submit_seconds=10.0 * i,
        owner="ann" if i < 2 else "bob",
        deadline_seconds=195.0,
    )
    for i in range(3)
)
SCENARIO = Scenario(jobs=JOBS, nodes=(node("a0"), node("b0", "B")), options_of=lambda _: OPTIONS)


def market_options(_: object) -> OptionSet:
    return option_set(([4], 4.0))


MARKET = Scenario(
    jobs=JOBS,
    nodes=(),
    options_of=market_options,
    offers=(Offer(name="a", gpu="A", num_gpus=4, price_dollars_per_hour=36.0),),
    budget_dollars_per_hour=1000.0,
)


def test_fairness_is_jains_index_of_the_service_of_owners():
    report = run_policy(SCENARIO, "fifo").report

    # Each takes 100 s alone; they were there for 100, 190 and 280 s.
    ann, bob = (100 / 100 + 100 / 190) / 2, 100 / 280
    assert report.fairness_over == "owners"
    assert report.fairness == pytest.approx((ann + bob) ** 2 / (2 * (ann**2 + bob**2)))


def test_where_nobody_names_owners_fairness_is_over_jobs():
    jobs = tuple(replace(one, owner="") for one in JOBS)
    report = run_policy(replace(SCENARIO, jobs=jobs), "fifo").report

    x = [1.0, 100 / 190, 100 / 280]
    assert report.fairness_over == "jobs"
    assert report.fairness == pytest.approx(sum(x) ** 2 / (3 * sum(one**2 for one in x)))


def test_an_unfinished_job_counts_with_the_service_it_got():
    report = run_policy(replace(SCENARIO, horizon_seconds=150.0), "fifo").report

    # At 150 s the second has done half of its work in 140 s; the third nothing.
    ann, bob = (1.0 + 0.5 * 100 / 140) / 2, 0.0
    assert report.num_unfinished == 2
    assert report.fairness == pytest.approx((ann + bob) ** 2 / (2 * (ann**2 + bob**2)))


def test_deadlines_are_met_or_not():
    report = run_policy(SCENARIO, "fifo").report

    # Ends at 100, 200 and 300 s.
    assert (report.num_deadlines, report.num_deadlines_met) == (3, 1)


def test_rented_nodes_are_used_and_paid_for():
    run = run_policy(MARKET, "budget")
    report = run.report

    assert report.num_done == 3
    # Each job needs four GPUs for 100 s, and 36 dollars an hour are a cent a second.
    assert report.spent_dollars >= 3 * 100 * 0.01 - 1e-6
    assert report.utilisation["A"] == pytest.approx(12 * 100 / (report.spent_dollars / 0.01 * 4))
    assert report.gpu_hours == {"A": pytest.approx(1200 / 3600)}


def test_what_can_be_rented_is_within_reach():
    offers = (Offer(name="x", gpu="B", num_gpus=8, price_dollars_per_hour=1.0, most_nodes=3),)

    found = reachable_nodes((node("a0"),), offers)

    assert [(one.gpu, one.num_gpus) for one in found] == [("A", 4), ("B", 8), ("B", 8), ("B", 8)]


def test_every_policy_says_what_it_was_told():
    given = Information(speeds="measured (x.csv)", speed_error_share=0.2)

    lines = statements(["prices", "fifo", "cells-deadline"], given)

    assert lines == [
        "prices, cells-deadline: speeds measured (x.csv), off by up to 20%; lengths known",
        "fifo: told nothing about speeds or lengths; keeps to the GPUs that were asked for",
    ]
    unknown = replace(given, knows_lengths=False)
    assert "lengths not known" in statements(["prices"], unknown)[0]
    assert policy_information("prices", unknown)["uses_lengths"] is False


def test_a_policy_that_leaves_jobs_undone_is_not_called_the_quickest():
    done = run_policy(SCENARIO, "fifo").report
    hasty = replace(done, policy="hasty", num_done=1, num_unfinished=2, mean_completion_seconds=1.0)

    lines = {line.label: line for line in report_lines([done, hasty])}

    assert lines["mean completion"].best() == set()
    assert lines["done"].best() == {0}
    assert headline([done, hasty]).startswith("fifo finishes 3 of 3 jobs")


def test_the_completion_curve_stops_where_jobs_are_unfinished():
    run = run_policy(replace(SCENARIO, horizon_seconds=150.0), "fifo")

    curve = completion_curve(JOBS, run.log)

    assert curve == {"seconds": [100.0], "share": [pytest.approx(1 / 3, abs=1e-4)]}


def test_series_integrate_to_what_the_report_says():
    faults = FaultSpec(seed=3, node_losses_per_hour=30, repair_seconds=30, checkpoint_seconds=20)
    run = run_policy(replace(SCENARIO, faults=faults), "fifo")
    end = run.end_seconds

    use = use_by_type(SCENARIO.nodes, run.log, end)["types"]
    waiting = waiting_jobs(JOBS, run.log, end)

    for gpu, share in run.report.utilisation.items():
        mean = sum(use[gpu]["held"]) / sum(use[gpu]["there"])
        assert mean == pytest.approx(share, rel=1e-3)
    held = sum(run.report.gpu_hours.values()) * 3600 / 4  # every job holds four GPUs
    stayed = run.report.least_mean_completion_seconds * 3
    assert sum(waiting) / len(waiting) * end == pytest.approx(stayed - held, rel=1e-3)


def test_tiles_cover_just_what_was_held():
    run = run_policy(SCENARIO, "prices")

    gpus = gpu_tiles(SCENARIO.nodes, run.log, run.end_seconds, JOBS)

    area = sum(lanes * (until - since) for _, _, lanes, since, until, _ in gpus["tiles"])
    assert area == pytest.approx(sum(run.report.gpu_hours.values()) * 3600, rel=0.02)
    assert gpus["lanes"] == [4, 4]
    assert gpus["num_left_out"] == 0


def test_prices_are_overheard_from_policies_that_have_them():
    assert set(price_curves(run_policy(SCENARIO, "prices").record, 300.0)["types"]) == {"A", "B"}
    assert price_curves(run_policy(SCENARIO, "fifo").record, 300.0) == {}


def test_the_spend_ends_at_what_was_spent():
    run = run_policy(MARKET, "budget")

    curve = spend_curve(run.record, run.end_seconds, run.report.spent_dollars)

    assert curve["dollars"][-1] == pytest.approx(run.report.spent_dollars, rel=1e-3)
    assert curve["dollars"] == sorted(curve["dollars"])
    assert spend_curve(run_policy(SCENARIO, "fifo").record, 300.0, 0.0) == {}


def test_the_page_is_whole_and_asks_nobody_for_anything():
    nasty = replace(JOBS[0], owner="</script><script>alert(1)</script>")
    scenario = replace(SCENARIO, jobs=(nasty, *JOBS[1:]))
    runs = [run_policy(scenario, name) for name in ("prices", "fifo")]

    page = render_page(scenario, runs, title="A & B", remarks=["told <nothing>"])

    assert "<title>A &amp; B</title>" in page
    assert "%%" not in page
    assert re.findall(r"https?://[^\s\"']+", page) == ["http://www.w3.org/2000/svg"]
    assert "<script>alert" not in page
    content = re.search(r'id="content">(.*?)</script>', page, re.S)
    assert content is not None
    found = json.loads(content.group(1))
    assert found["jobs"][0][2] == nasty.owner
    assert [one["policy"] for one in found["runs"]] == ["prices", "fifo"]
    assert found["table"]["policies"] == ["prices", "fifo"]
