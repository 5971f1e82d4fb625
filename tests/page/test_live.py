"""What happens shows by itself; what is not live never looks as if it were."""

import os

import pytest
from page_services import LIVE

from drystone.run.control.notes import Drained

pytestmark = [pytest.mark.slow, pytest.mark.second_try("Chromium")]

# The bar is 50 browsers: DRYSTONE_NUM_BROWSERS=50.
NUM_BROWSERS = int(os.environ.get("DRYSTONE_NUM_BROWSERS", "3"))


def test_a_job_shows_up_and_ends_without_a_reload(empty, look):
    jobs, feed = look(empty, "jobs"), look(empty, "events")
    jobs.wait_for_selector("text=No jobs here")
    feed.wait_for_selector(LIVE)
    job_id = empty.submit("hello")
    jobs.wait_for_selector(".jobs tbody tr:has-text('hello')")
    feed.wait_for_selector(f".feed li:has-text('Job {job_id} was submitted')")
    empty.controller.cancel(job_id)
    jobs.wait_for_selector("text=No jobs here")
    feed.wait_for_selector(f".feed li:has-text('Job {job_id} was cancelled')")


def test_tiles_follow_the_cluster(empty, look):
    page = look(empty)
    page.wait_for_selector(LIVE)
    journal = empty.controller.journal
    node = journal.live.state.nodes[0].id
    journal.commit([Drained(time_seconds=journal.now(), node=node)])
    page.wait_for_selector(f".node.drained:has-text('{node}')")


def test_browsers_survive_a_restart_and_show_nothing_stale_as_live(empty, look):
    pages = [look(empty, "jobs") for _ in range(NUM_BROWSERS)]
    for page in pages:
        page.wait_for_selector(LIVE)
    empty.submit("before")
    for page in pages:
        page.wait_for_selector(".jobs tbody tr:has-text('before')")
    empty.stop()
    for page in pages:
        page.wait_for_selector("html[data-live=lost]")
        assert "The connection is lost" in page.locator("#notice").inner_text()
        assert page.locator("#status").inner_text().startswith("Not live")
        grey = page.locator("main > *").first.evaluate("(one) => getComputedStyle(one).filter")
        assert grey == "grayscale(1)"
        assert page.locator(".jobs tbody tr").count() == 1  # what was known stays, greyed
    empty.start()
    empty.submit("after")
    # From the moment it is called live, it is up to date.
    for page in pages:
        page.wait_for_selector(LIVE)
        assert page.locator("#notice").is_hidden()
        page.wait_for_selector(".jobs tbody tr:has-text('after')")


def test_a_stream_that_says_nothing_is_not_live(empty, look):
    page = look(empty)
    page.wait_for_selector(LIVE)
    page.clock.install()
    page.reload()
    page.wait_for_selector(LIVE)
    page.evaluate(
        """() => {
          window.states = [];
          new MutationObserver(() => window.states.push(document.documentElement.dataset.live))
            .observe(document.documentElement, { attributeFilter: ["data-live"] });
        }"""
    )
    page.clock.fast_forward(20_000)  # as if nothing had come for so long
    page.wait_for_function("() => window.states.includes('lost')")
    page.wait_for_selector(LIVE)  # and it connects again


def test_what_is_refused_for_now_is_asked_again(empty, look):
    answers = iter([429, 503])
    page = look(empty, "about")

    def answer(route) -> None:
        status = next(answers, None)
        if status is None:
            route.continue_()
        else:
            route.fulfill(status=status, json={"error": {"message": "later"}})

    empty.expects_failures = True
    page.route("**/v1/page/jobs*", answer)
    page.goto(f"{empty.address}/#/jobs")
    page.wait_for_selector("text=No jobs here")
    assert next(answers, None) is None
