"""How quick is the page with 10,000 jobs in the store, 500 of them live, and what do updates cost?

Promised: every view paints within 1 s, and live updates cost under 10 % of a core. A view is
painted when its data is shown and called live; the clock is the browser's, from the beginning of
the navigation, nothing cached. While one browser watches, the service writes five events a second,
as the controller would; the cost is CPU time of the service with the browser less that without.
Wall time says little on a machine with other work: read the CPU seconds too.

    python benchmarks/page_paint.py [--jobs 10000] [--live 500] [--times 3] [--seconds 20]
"""

from __future__ import annotations

import argparse
import os
import shutil
import statistics
import subprocess
import sys
import tempfile
import threading
import time
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any

from figures import print_figures, print_skip

HERE = Path(__file__).resolve().parent
sys.path.insert(0, str(HERE.parent / "tests" / "page"))

PAINTED = """
new MutationObserver(() => {
  if (window.painted || document.documentElement.dataset.live !== "live") return;
  if (!document.querySelector("main .card")) return;
  if (document.querySelector("main .skeleton")) return;
  window.painted = -1;
  requestAnimationFrame(() => setTimeout(() => { window.painted = performance.now(); }, 0));
}).observe(document, { subtree: true, childList: true, attributes: true });
"""


def main() -> None:
    """Measure, print."""
    given = _arguments()
    if given.serve:
        serve(Path(given.serve), given.port)
        return
    if shutil.which("chromium") is None:
        print_skip("Chromium is not installed (Debian: apt-get install chromium)")
        return
    from playwright.sync_api import sync_playwright

    with tempfile.TemporaryDirectory(prefix="drystone-page-") as name:
        folder = Path(given.folder or f"{name}/s")
        waiting = _fill(folder, given.jobs, given.live)
        with _serving(folder) as (server, port), sync_playwright() as playwright:
            browser = playwright.chromium.launch(
                executable_path=shutil.which("chromium"), args=["--no-sandbox"]
            )
            routes = ("cluster", "jobs", "jobs?group=all", f"job/{waiting['running']}",
                      f"job/{waiting['queued']}", "prices", "spend", "events")  # fmt: skip
            print(f"{given.jobs} jobs, {given.live} live; load {os.getloadavg()[0]:.1f}")
            painted = [
                _report_paint(browser, server, port, route=route, times=given.times)
                for route in routes
            ]
            share = _report_updates(browser, server, port, given.seconds)
            browser.close()
        print_figures({"slowest_view_seconds": max(painted), "updates_core_share": share})


def _report_paint(browser: Any, server: int, port: int, *, route: str, times: int) -> float:
    """The best of some times, in seconds: a busy machine only ever adds."""
    painted, service, renderer = [], [], []
    for _ in range(times):
        context = browser.new_context(viewport={"width": 1280, "height": 900})
        page = context.new_page()
        page.add_init_script(PAINTED)
        before = _cpu_seconds(server)
        page.goto(f"http://127.0.0.1:{port}/#/{route}")
        page.wait_for_function("() => window.painted > 0", timeout=120_000)
        service.append(_cpu_seconds(server) - before)
        painted.append(page.evaluate("() => window.painted") / 1000)
        session = context.new_cdp_session(page)
        session.send("Performance.enable")
        renderer.append(_metric(session, "ProcessTime"))
        context.close()
    print(
        f"{route:16} painted {statistics.median(painted):.2f} s (best {min(painted):.2f}); CPU: "
        f"service {min(service):.2f} s, the page's process {min(renderer):.2f} s",
        flush=True,
    )
    return float(min(painted))


def _report_updates(browser: Any, server: int, port: int, seconds: float) -> float:
    """The most that watching a view costs the service, as a share of a core."""
    alone, most = _cpu_share([server], seconds), 0.0
    context = browser.new_context(viewport={"width": 1280, "height": 900})
    page = context.new_page()
    print(f"service, nobody watches: {100 * alone:.1f} % of a core")
    for route in ("cluster", "jobs", "events"):
        page.goto(f"http://127.0.0.1:{port}/#/{route}")
        page.wait_for_selector("html[data-live=live]", timeout=60_000)
        session = context.new_cdp_session(page)
        session.send("Performance.enable")
        before = _metric(session, "ProcessTime")
        share = _cpu_share([server], seconds)
        page_share = (_metric(session, "ProcessTime") - before) / seconds
        print(f"watching {route:8}: service {100 * (share - alone):+.1f} % of a core, "
              f"the page's process {100 * page_share:.1f} %", flush=True)  # fmt: skip
        most = max(most, share - alone)
    context.close()
    return most


def _metric(session: Any, name: str) -> float:
    """One of the numbers that Chromium keeps about a page."""
    metrics = session.send("Performance.getMetrics")["metrics"]
    return float(next(one["value"] for one in metrics if one["name"] == name))


def _cpu_share(pids: list[int], seconds: float) -> float:
    """CPU seconds a second of some processes."""
    before, began = sum(map(_cpu_seconds, pids)), time.monotonic()
    time.sleep(seconds)
    return (sum(map(_cpu_seconds, pids)) - before) / (time.monotonic() - began)


def _cpu_seconds(pid: int) -> float:
    fields = Path(f"/proc/{pid}/stat").read_text().rpartition(")")[2].split()
    return (int(fields[11]) + int(fields[12])) / os.sysconf("SC_CLK_TCK")


def _fill(folder: Path, num_jobs: int, num_live: int) -> dict[str, str]:
    import worlds

    controller = worlds.open_controller(folder)
    if not controller.journal.live.jobs:
        worlds.fill_past(controller, num_jobs - num_live)
        worlds.crowd(controller, num_live)
    active = controller.journal.live.state.active
    found = {one.state.value: job_id for job_id, one in active.items()}
    controller.close()
    return found


@contextmanager
def _serving(folder: Path) -> Iterator[tuple[int, int]]:
    import socket

    with socket.socket() as probe:
        probe.bind(("127.0.0.1", 0))
        port = probe.getsockname()[1]
    command = [sys.executable, __file__, "--serve", str(folder), "--port", str(port)]
    process = subprocess.Popen(command)
    try:
        for _ in range(3000):
            if process.poll() is not None:
                raise SystemExit("the service ended")
            with socket.socket() as probe:
                if probe.connect_ex(("127.0.0.1", port)) == 0:
                    break
            time.sleep(0.1)
        yield process.pid, port
    finally:
        process.terminate()
        process.wait(timeout=30)


def serve(folder: Path, port: int) -> None:
    """The service, with five events a second: reports of running jobs, jobs that come and go."""
    import uvicorn
    import worlds

    from drystone.run.events import Progressed
    from drystone.service.app import make_app

    controller = worlds.open_controller(folder)
    worlds.adopt(controller)

    def happen() -> None:
        journal, number = controller.journal, 0
        while True:
            time.sleep(0.2)
            number += 1
            with journal.lock:
                running = [one for one in journal.live.state.active.values() if one.num_gpus]
                one = running[number % len(running)]
                journal.commit([Progressed(
                    time_seconds=journal.now(), job_id=one.spec.id,
                    done_samples=one.done_samples + 1, samples_per_second=one.samples_per_second,
                )])  # fmt: skip
            if number % 10 == 0:
                table = {"name": f"new-{number}", "model": "gpt2", "train": {"steps": 9}}
                worlds.submit(controller, worlds.Arrival(0.0, table, "nobody"))

    threading.Thread(target=happen, daemon=True).start()
    uvicorn.run(make_app(controller), host="127.0.0.1", port=port, log_level="warning")


def _arguments() -> argparse.Namespace:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0] if __doc__ else "")
    parser.add_argument("--jobs", type=int, default=10_000)
    parser.add_argument("--live", type=int, default=500)
    parser.add_argument("--times", type=int, default=3)
    parser.add_argument("--seconds", type=float, default=20.0)
    parser.add_argument("--folder", default="", help="filled once, used again; none: a new one")
    parser.add_argument("--serve", default="", help=argparse.SUPPRESS)
    parser.add_argument("--port", type=int, default=0, help=argparse.SUPPRESS)
    return parser.parse_args()


if __name__ == "__main__":
    main()
