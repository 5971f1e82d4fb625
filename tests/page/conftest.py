"""Chromium, and services with real controllers for it to look at."""

import fcntl
import shutil
import sys
from pathlib import Path

import pytest

sys.path.insert(0, str(Path(__file__).parent))

import worlds
from page_services import Service


@pytest.fixture(scope="session")
def browser():
    """Debian's Chromium; Playwright's own is not downloaded."""
    sync_api = pytest.importorskip(
        "playwright.sync_api", reason="left out: no Playwright here (make setup)"
    )
    path = shutil.which("chromium")
    if path is None:
        pytest.skip("left out: no Chromium here (apt-get install chromium)")
    with sync_api.sync_playwright() as playwright:
        made = playwright.chromium.launch(executable_path=path, args=["--no-sandbox"])
        yield made
        made.close()


@pytest.fixture(scope="session")
def stories(tmp_path_factory) -> Path:
    """Folders of services with a past, told once for all workers."""
    root = tmp_path_factory.getbasetemp()
    shared = (root.parent if root.parent.name.startswith("pytest-") else root) / "page-stories"
    shared.mkdir(exist_ok=True)
    with (shared / "lock").open("w") as lock:
        fcntl.flock(lock, fcntl.LOCK_EX)
        if not (shared / "done").exists():
            made = worlds.open_controller(shared / "busy")
            worlds.tell(made, worlds.busy_story(200, faults=True))
            made.close()
            (shared / "done").touch()
    return shared


@pytest.fixture
def busy(stories, tmp_path):
    """200 jobs: some done, some failed, some running, many waiting."""
    shutil.copytree(stories / "busy", tmp_path / "s")
    with Service(tmp_path / "s").running() as service:
        yield service


@pytest.fixture
def empty(tmp_path):
    """Nothing happened yet, on emulated devices."""
    with Service(tmp_path / "s", worlds.EMULATED).running() as service:
        yield service


@pytest.fixture
def look(browser):
    """Open a page; what it complains about fails the test."""
    opened, complaints = [], []

    def open_page(service, route: str = "cluster", *, width: int = 1280, **options):
        height = 844 if width < 600 else 900
        context = browser.new_context(
            viewport={"width": width, "height": height}, reduced_motion="reduce", **options
        )
        context.set_default_timeout(60_000)  # a bound, not a wait: the machine may be busy
        opened.append(context)
        page = context.new_page()
        page.on("pageerror", lambda error: complaints.append(str(error)))
        page.on(
            "console",
            lambda message: (
                complaints.append(message.text)
                if message.type == "error" and not service.is_expected(message.text)
                else None
            ),
        )
        page.goto(f"{service.address}/#/{route}")
        return page

    yield open_page
    for context in opened:
        context.close()
    assert complaints == []
