"""What people do on the page: submit, submit again, compare, sort, save, look at a node."""

import csv

import pytest
from page_services import LIVE

pytestmark = [pytest.mark.slow, pytest.mark.second_try("Chromium")]

JOB = "name: from-the-page\nmodel: mini-gpt\ntrain: {steps: 5, batch: 8, sequence: 32}\n"


def test_a_job_is_tried_out_and_then_submitted(empty, look):
    page = look(empty, "submit")
    page.wait_for_selector(LIVE)
    page.locator("textarea").fill(JOB)
    page.get_by_role("button", name="Show what it would get").click()
    page.wait_for_selector(".choices tbody tr")
    assert empty.jobs("queued") == []
    page.get_by_role("button", name="Submit", exact=True).click()
    page.wait_for_selector("text=Submitted as job 1")

    assert empty.controller.journal.live.jobs["1"].job.name == "from-the-page"


def test_what_is_wrong_with_a_job_is_said_beside_it(empty, look):
    empty.expects_failures = True
    page = look(empty, "submit")
    page.wait_for_selector(LIVE)
    page.locator("textarea").fill("modle: mini-gpt\n")
    page.get_by_role("button", name="Submit", exact=True).click()

    page.wait_for_selector("[role=alert]:has-text('modle')")
    assert page.locator("textarea").input_value() == "modle: mini-gpt\n"
    assert not empty.controller.journal.live.jobs


def test_a_job_that_is_over_is_submitted_again(empty, look):
    first = empty.submit("once")
    empty.controller.cancel(first)
    page = look(empty, f"job/{first}")
    page.get_by_role("button", name="Submit again").click()
    page.get_by_role("button", name="Submit it again").click()
    page.wait_for_selector(".toast:has-text('submitted again')")

    jobs = empty.controller.journal.live.jobs
    assert [one.job.name for one in jobs.values()] == ["once", "once"]


def test_a_list_is_sorted_narrowed_and_saved(busy, look):
    page = look(busy, "jobs?group=all&sort=cost")
    page.wait_for_selector(".jobs tbody tr")
    jobs = busy.controller.journal.live.jobs
    with page.expect_download() as saved:
        page.get_by_role("button", name="Save as CSV").click()
    with open(saved.value.path(), newline="", encoding="utf-8") as file:
        rows = list(csv.DictReader(file))

    costs = [float(row["dollars"]) for row in rows]
    assert len(rows) == page.locator(".jobs tbody tr").count() > 10
    assert costs == sorted(costs, reverse=True)
    assert costs[0] > costs[-1]
    owner = next(one.job.owner for one in jobs.values() if one.job.owner)
    page.get_by_label("Whose jobs").select_option(owner)
    number = sum(one.job.owner == owner for one in jobs.values())
    page.wait_for_selector(f".pager:has-text('{number} in all')")


def test_runs_are_compared_by_their_numbers(busy, look):
    busy.expects_failures = True  # there is no job 999
    page = look(busy, "compare")
    page.wait_for_selector("text=Which jobs?")
    page.get_by_label("Numbers of jobs").fill("1, 2, 999")
    page.keyboard.press("Enter")
    page.wait_for_function("() => location.hash.includes('jobs=1')")
    page.wait_for_selector("main .card:not(:has-text('Which jobs'))")
    page.get_by_label("Logarithmic").check()
    page.wait_for_function("() => location.hash.includes('log=yes')")


def test_a_node_has_a_view_of_its_own(busy, look):
    node = busy.controller.journal.live.state.nodes[0].id
    page = look(busy)
    page.locator(f".node-head a:has-text('{node}')").first.click()
    page.wait_for_selector(f"h1:has-text('{node}')")

    page.wait_for_selector("dt:has-text('Type')")
    assert page.get_by_role("button", name="Drain").count() == 1
