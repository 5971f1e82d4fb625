"""Who sees what and may do what: signing in, roles, questions before anything is changed."""

import pytest
from page_services import LIVE, sign_in

pytestmark = [pytest.mark.slow, pytest.mark.second_try("Chromium")]


def test_without_a_token_nothing_is_shown_and_a_wrong_one_is_refused(busy, look):
    token = busy.token("viewer", "research")
    busy.expects_failures = True  # the browser notes the refusals
    page = look(busy, "jobs")
    page.wait_for_selector("text=Sign in to Drystone")
    assert page.locator("nav a:visible").count() == 0
    page.get_by_label("Token").fill("dry_000000000000_" + "x" * 43)
    page.get_by_role("button", name="Sign in").click()
    page.wait_for_selector("text=This token is not known here")
    sign_in(page, token)

    page.wait_for_selector(".jobs tbody tr")
    assert "viewer" in page.locator("#account").inner_text()
    assert page.evaluate("() => document.cookie") == ""  # scripts cannot read the session
    assert token not in page.evaluate(
        "() => JSON.stringify([{...localStorage}, {...sessionStorage}])"
    )
    page.get_by_role("button", name="Sign out").click()
    page.wait_for_selector("text=Sign in to Drystone")
    page.reload()
    page.wait_for_selector("text=Sign in to Drystone")


def test_a_role_is_not_offered_what_it_may_not_do(busy, look):
    tokens = {role: busy.token(role, "research") for role in ("viewer", "submitter", "admin")}
    live = busy.controller.journal.live
    waiting = busy.jobs("queued")
    own = next(one for one in waiting if live.jobs[one].job.team == "research")
    other = next(one for one in waiting if live.jobs[one].job.team == "product")
    busy.expects_failures = True  # the future of another team's job is refused
    offered = {}
    for role, token in tokens.items():
        page = look(busy)
        sign_in(page, token)
        drains = page.get_by_role("button", name="Drain").count()
        cancels = []
        for job_id in (own, other):
            page.goto(f"{busy.address}/#/job/{job_id}")
            page.wait_for_selector(f"h1:has-text('{live.jobs[job_id].job.name}')")
            page.wait_for_selector(".life")
            cancels.append(page.get_by_role("button", name="Cancel").count())
        offered[role] = (drains, *cancels)
        closed = page.get_by_text("This job belongs to another team.").count()
        assert closed == (0 if role == "admin" else 1)

    nodes = len(busy.controller.cluster.nodes)
    assert offered == {"viewer": (0, 0, 0), "submitter": (0, 1, 0), "admin": (nodes, 1, 1)}


def test_changes_are_asked_about_and_then_made(busy, look):
    job_id = busy.jobs("queued")[0]
    page = look(busy, f"job/{job_id}")
    page.wait_for_selector(LIVE)
    state = lambda: busy.controller.find(job_id).state.value  # noqa: E731

    page.get_by_role("button", name="Pause").click()
    page.get_by_role("button", name="Go back").click()
    assert state() == "queued"
    page.get_by_role("button", name="Pause").click()
    page.get_by_role("button", name="Pause the job").click()
    page.get_by_role("button", name="Resume").click()
    assert state() == "paused"
    page.get_by_role("button", name="Resume the job").click()
    page.get_by_role("button", name="Cancel").click()
    page.keyboard.press("Escape")
    assert state() == "queued"
    page.get_by_role("button", name="Cancel").click()
    page.get_by_role("button", name="Cancel the job").click()
    page.wait_for_selector(".state.s-cancelled")

    assert state() == "cancelled"
    assert page.get_by_role("button", name="Cancel").count() == 0


def test_an_answer_that_breaks_off_is_no_answer(empty, look):
    page = look(empty)
    page.wait_for_selector(LIVE)
    found = page.evaluate(
        """async () => {
          const { get } = await import("/page/api.js");
          const fetched = window.fetch;
          const broken = () => new ReadableStream({
            pull(body) { body.error(new TypeError("gone")); },
          });
          window.fetch = async () => new Response(broken());
          try {
            return JSON.stringify(await get("/v1/jobs"));
          } catch (error) {
            return String(error.name || error);
          } finally {
            window.fetch = fetched;
          }
        }"""
    )

    assert found == "TypeError"


def test_an_admin_drains_a_node(busy, look):
    page = look(busy)
    page.wait_for_selector(LIVE)
    page.get_by_role("button", name="Drain t4-5").focus()
    page.keyboard.press("Enter")
    page.get_by_role("button", name="Drain the node").click()
    page.wait_for_selector(".node.drained .chip:has-text('drained')")

    assert busy.controller.journal.live.drained == {"t4-5": ""}
    page.get_by_role("button", name="Use again t4-5").click()
    page.get_by_role("button", name="Use the node").click()
    page.wait_for_function("() => !document.querySelector('.node.drained')")


def test_the_keyboard_reaches_everything(busy, look):
    page = look(busy)
    page.wait_for_selector(LIVE)
    page.keyboard.press("Tab")
    assert page.evaluate("() => document.activeElement.textContent") == "Skip to the content"
    page.keyboard.press("Enter")
    assert page.evaluate("() => document.activeElement.id") == "view"
    page.locator("[data-tile]").first.focus()
    here = "() => document.activeElement.dataset.key"
    seen = [page.evaluate(here)]
    for key in ("ArrowRight", "ArrowDown", "ArrowLeft", "ArrowUp", "End", "Home"):
        page.keyboard.press(key)
        seen.append(page.evaluate(here))

    assert seen == [
        "a100-0/0",
        "a100-0/1",
        "a100-0/5",
        "a100-0/4",
        "a100-0/0",
        "a100-1/7",
        "a100-0/0",
    ]
    assert page.locator("#tip").is_visible()
    page.locator("[data-tile][data-job]").first.focus()  # others may have taken jobs away
    job_id = page.evaluate("() => document.activeElement.dataset.job")
    page.keyboard.press("Enter")
    page.wait_for_selector(f".crumb:has-text('{job_id}')")
    chart = page.locator("[data-chart]").first
    chart.focus()
    page.keyboard.press("ArrowLeft")
    assert "step" in page.locator("#tip").inner_text()
