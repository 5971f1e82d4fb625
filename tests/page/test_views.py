"""Every view in Chromium: no complaints, nothing sticks out, everybody can read it."""

import json
from pathlib import Path

import pytest
import worlds
from page_services import LIVE, VIEWS, Service

from drystone.describe.files.market import parse_market
from drystone.run.renting.provider import Renting, live_offers
from drystone.run.renting.simulated_cloud import CloudConditions, SimulatedCloud

AXE = Path(__file__).parent / "vendor" / "axe.min.js"
SHIFTS = """() => new Promise((done) => {
  let sum = 0;
  new PerformanceObserver((list) => {
    for (const one of list.getEntries()) if (!one.hadRecentInput) sum += one.value;
  }).observe({ type: "layout-shift", buffered: true });
  setTimeout(() => done(sum), 50);
})"""

MARKET = """
offers:
  - {name: spot-t4, gpu: T4, num_gpus: 1, price_dollars_per_hour: 0.4, start_delay_seconds: 9}
"""

pytestmark = [pytest.mark.slow, pytest.mark.second_try("Chromium")]


def axe_findings(page) -> list[str]:
    """What axe calls serious or worse. It is run beside the page's own scripts, as an add-on."""
    page.evaluate(AXE.read_text(encoding="utf-8") + ";null")
    found = page.evaluate("() => axe.run(document, { resultTypes: ['violations'] })")
    return [
        f"{one['id']}: {json.dumps([node['html'][:160] for node in one['nodes'][:3]])}"
        for one in found["violations"]
        if one["impact"] in ("serious", "critical")
    ]


def visit(page, service, routes, check) -> None:
    for route in routes:
        page.goto(f"{service.address}/#/{route}")
        page.wait_for_selector(LIVE)
        page.wait_for_selector("main :is(.card, .empty, table)")
        page.wait_for_function("() => !document.querySelector('main .skeleton')")
        check(route)


def routes_of(service) -> list[str]:
    states = ("running", "queued", "failed")
    return [*VIEWS, *(f"job/{one}" for state in states for one in service.jobs(state)[:1])]


@pytest.mark.parametrize("world", ["empty", "busy"])
@pytest.mark.parametrize(("width", "theme"), [(1280, "light"), (390, "dark")])
def test_every_view_can_be_read_by_everybody(world, width, theme, look, request):
    service = request.getfixturevalue(world)
    page = look(service, width=width, color_scheme=theme)

    def check(route: str) -> None:
        wide = page.evaluate("() => document.documentElement.scrollWidth")
        assert wide <= width, f"{route} is {wide} px wide"
        assert axe_findings(page) == [], route
        assert page.locator("h1").count() == 1, route
        assert page.title() != "Drystone", route

    visit(page, service, routes_of(service), check)


def test_nothing_jumps_while_a_view_loads(busy, look):
    page = look(busy)
    page.wait_for_selector(LIVE)
    shifts = {}
    for route in ("cluster", "jobs", "prices", "spend"):
        page.goto("about:blank")
        page.goto(f"{busy.address}/#/{route}")
        page.wait_for_selector(LIVE)
        page.wait_for_function("() => !document.querySelector('main .skeleton')")
        shifts[route] = page.evaluate(SHIFTS)

    assert max(shifts.values()) < 0.1, shifts  # what is called good


def test_the_toggle_turns_dark_and_is_remembered(empty, look):
    page = look(empty, color_scheme="light")
    page.wait_for_selector(LIVE)
    ground = "() => getComputedStyle(document.body).backgroundColor"
    light = page.evaluate(ground)
    page.get_by_role("button", name="Turn dark").click()
    dark = page.evaluate(ground)
    page.reload()

    assert dark != light
    assert page.evaluate(ground) == dark
    assert page.get_by_role("button", name="Turn light").is_visible()


def test_emulated_devices_are_said_to_be(empty, look):
    page = look(empty)
    page.wait_for_selector(LIVE)

    assert page.get_by_text("These GPUs are emulated.").is_visible()
    tips = page.locator("[data-tile]").evaluate_all("(all) => all.map((one) => one.dataset.tip)")
    assert len(tips) == 4
    assert all("emulated on a processor" in one for one in tips)


def test_tiles_say_who_has_which_device(busy, look):
    page = look(busy)
    page.wait_for_selector(LIVE)
    live = busy.controller.journal.live
    held = {
        (node, device): job_id
        for job_id, record in live.state.active.items()
        if record.num_gpus
        for node, device in live.jobs[job_id].devices
    }
    shown = page.locator("[data-job][data-tile]").evaluate_all(
        "(all) => all.map((one) => [one.dataset.key, one.dataset.job])"
    )

    assert {tuple(key.split("/")): job for key, job in shown} == {
        (node, str(device)): job for (node, device), job in held.items()
    }
    assert "real" in page.locator("[data-job][data-tile]").first.get_attribute("data-tip")


def test_a_job_shows_its_life_its_curves_and_its_plan(busy, look):
    live = busy.controller.journal.live
    job_id = max(busy.jobs("running"), key=lambda one: live.state.jobs[one].num_starts)
    page = look(busy, f"job/{job_id}")
    page.wait_for_selector(".plan .shares")

    assert page.locator("h1").inner_text() == live.jobs[job_id].job.name
    assert page.locator(".life-block.l-running, .life-block.l-resized").count() >= 2
    for name in ("Loss", "Speed"):
        path = page.get_by_role("region", name=name, exact=True).locator("path.line")
        assert len(path.get_attribute("d")) > 200
    devices = page.locator(".plan .device").all_inner_texts()
    expected = [f"{node} device {device}" for node, device in live.jobs[job_id].devices]
    assert sorted(devices) == sorted(expected)
    page.wait_for_selector("h2:has-text('Why')")
    assert page.locator(".options tr.chosen").count() <= 1


def test_a_failed_job_says_why(busy, look):
    page = look(busy, f"job/{busy.jobs('failed')[0]}")

    page.wait_for_selector(".verdict:has-text('No such file or directory')")
    assert page.get_by_role("button", name="Cancel").count() == 0  # it is over


def test_renting_is_shown_against_its_budget(tmp_path, look):
    offers = live_offers(parse_market(MARKET), is_simulated=True)
    cloud = SimulatedCloud(tmp_path / "cloud.json", offers, CloudConditions())
    renting = Renting(provider=cloud, offers=offers, budget_dollars_per_hour=400.0)
    with Service(tmp_path / "s", worlds.EMULATED, renting=renting).running() as service:
        page = look(service, "spend")
        card = page.get_by_role("region", name="Renting", exact=True)
        card.wait_for()

        assert "0 rented now for $0.00 an hour" in card.inner_text()
        assert "of $400.00 an hour" in card.inner_text()
        assert card.get_by_role("row", name="spot-t4 1 T4-16GB $0.40 yes").is_visible()
        assert axe_findings(page) == []


def test_lists_are_paged_and_searched(busy, look):
    page = look(busy, "jobs?group=all")
    page.wait_for_selector("text=page 1 of 4, 200 in all")
    page.get_by_role("link", name="Next").click()
    page.wait_for_selector("text=page 2 of 4")
    page.get_by_role("searchbox").fill("pretrain")
    page.wait_for_function(
        "() => [...document.querySelectorAll('.jobs .job-link')]"
        ".every((one) => one.textContent.startsWith('pretrain'))"
    )

    assert page.locator(".jobs tbody tr").count() > 5
    page.get_by_role("searchbox").fill("no such name")
    page.wait_for_selector("text=Nothing found")
