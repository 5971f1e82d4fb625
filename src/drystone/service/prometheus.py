"""Numbers for Prometheus: its text format, written by hand, with names by its conventions."""

from __future__ import annotations

import resource
import threading
from bisect import bisect_left
from collections import Counter
from collections.abc import Iterable
from typing import Final

from drystone import __version__
from drystone.run.control.controller import Controller
from drystone.run.lifecycle import JobState
from drystone.service.job_series import Sample, job_series

CONTENT_TYPE: Final = "text/plain; version=0.0.4; charset=utf-8"
_EDGES: Final = (0.001, 0.0025, 0.005, 0.01, 0.025, 0.05, 0.1, 0.25, 0.5, 1.0, 2.5, 10.0)
_METHODS: Final = frozenset({"GET", "HEAD", "POST", "PUT", "PATCH", "DELETE", "OPTIONS"})
_PARTS: Final = ("store", "disk", "engine", "provider")


class Metrics:
    """Requests since the process started."""

    def __init__(self) -> None:
        self._lock = threading.Lock()
        self._requests: Counter[tuple[str, str, int]] = Counter()
        self._counts = [0] * (len(_EDGES) + 1)
        self._seconds = 0.0
        self.num_streams = 0

    def observe(self, method: str, route: str, status: int, seconds: float) -> None:
        """One request was answered; `route` is the pattern, never what somebody typed."""
        is_stream = route == "/v1/stream"
        with self._lock:
            shown = method if method in _METHODS else "other"
            self._requests[shown, route or "unknown", status] += 1
            if not is_stream:
                self._counts[bisect_left(_EDGES, seconds)] += 1
                self._seconds += seconds

    def render(self, controller: Controller) -> str:
        """Everything as text."""
        lines: list[str] = []
        _add(lines, "drystone_build_info", "gauge", "The version.", 1, version=__version__)
        self._add_requests(lines)
        _add_system(lines, controller)
        with controller.journal.lock:
            for name, kind, told, samples in job_series(controller):
                _add_all(lines, name, kind, told, samples)
        streams, used = self.num_streams, resource.getrusage(resource.RUSAGE_SELF)
        cpu, memory = used.ru_utime + used.ru_stime, used.ru_maxrss * 1024
        _add(lines, "drystone_stream_clients", "gauge", "Open connections to /v1/stream.", streams)
        _add(lines, "process_cpu_seconds_total", "counter", "User and system CPU time.", cpu)
        name = "process_max_resident_memory_bytes"
        _add(lines, name, "gauge", "The most memory ever resident.", memory)
        return "\n".join(lines) + "\n"

    def _add_requests(self, lines: list[str]) -> None:
        with self._lock:
            requests, counts = dict(self._requests), list(self._counts)
            seconds = self._seconds
        samples = [
            ({"method": method, "route": route, "status": str(status)}, count)
            for (method, route, status), count in sorted(requests.items())
        ]
        _add_all(lines, "drystone_http_requests_total", "counter", "Requests answered.", samples)
        name = "drystone_http_request_duration_seconds"
        _add_all(lines, name, "histogram", "Until the answer was sent; without streams.", ())
        total = 0
        for edge, count in zip([*map(str, _EDGES), "+Inf"], counts, strict=True):
            total += count
            lines.append(f'{name}_bucket{{le="{edge}"}} {total}')
        lines += [f"{name}_sum {seconds:.6f}", f"{name}_count {total}"]


def _add_system(lines: list[str], controller: Controller) -> None:
    journal = controller.journal
    with journal.lock:
        live, now = journal.live, journal.now()
        states = Counter(record.state for record in live.state.jobs.values())
        gpus: dict[tuple[str, str], float] = {}
        for row, node in enumerate(live.state.nodes):
            free = 0 if node.id in live.drained else journal.free_gpus(row)
            for what, count in (("free", free), ("total", node.num_gpus)):
                gpus[node.gpu, what] = gpus.get((node.gpu, what), 0) + count
        dollars: dict[str, float] = dict.fromkeys(live.access.teams, 0.0)
        for job_id, job in live.jobs.items():
            team = job.job.team
            dollars[team] = dollars.get(team, 0.0) + live.dollars_at(job_id, now)
        num_faults = sum(job.num_faults for job in live.jobs.values())
        rate = sum(job.dollars_per_hour for job in live.jobs.values())
        sequence = journal.sequence
    by_state = [({"state": state.value}, states[state]) for state in JobState]
    by_type = [({"gpu": gpu, "which": which}, gpus[gpu, which]) for gpu, which in sorted(gpus)]
    by_team = [({"team": team}, dollars[team]) for team in sorted(dollars)]
    _add_all(lines, "drystone_jobs", "gauge", "Jobs by state.", by_state)
    _add_all(lines, "drystone_gpus", "gauge", "GPUs by type: in all, and free.", by_type)
    _add_all(lines, "drystone_spent_dollars_total", "counter", "Spent on jobs, by team.", by_team)
    troubles, healthy = controller.reconciler.troubles, 0 if controller.last_error else 1
    parts = controller.troubles()
    by_part = [({"part": part}, int(part not in parts)) for part in _PARTS]
    _add_all(lines, "drystone_ready", "gauge", "1 for each part that can be used now.", by_part)
    alive, age = int(not controller.health.why_dead()), controller.health.round_age_seconds
    took = controller.decision_seconds
    for name, kind, told, value in (
        ("spending_dollars_per_hour", "gauge", "What runs now costs.", rate),
        ("job_faults_total", "counter", "Faults of jobs.", num_faults),
        ("jobs_put_aside", "gauge", "Jobs that could not be looked after.", len(troubles.by_job)),
        ("job_troubles_total", "counter", "How often a job was put aside.", troubles.num_in_all),
        ("events_total", "counter", "Events in the log.", sequence),
        ("last_decision_duration_seconds", "gauge", "What the last decision took.", took),
        ("healthy", "gauge", "1 unless something is wrong.", healthy),
        ("alive", "gauge", "1 while the loop completes rounds.", alive),
        ("round_age_seconds", "gauge", "Since a round was completed.", age),
    ):
        _add(lines, f"drystone_{name}", kind, told, value)


def _add(lines: list[str], name: str, kind: str, told: str, value: float, **labels: str) -> None:
    """A metric with one sample."""
    _add_all(lines, name, kind, told, [(labels, value)])


def _add_all(lines: list[str], name: str, kind: str, told: str, samples: Iterable[Sample]) -> None:
    lines += [f"# HELP {name} {told}", f"# TYPE {name} {kind}"]
    for labels, value in samples:
        shown = ",".join(f'{key}="{_escaped(text)}"' for key, text in labels.items())
        lines.append(f"{name}{{{shown}}} {value:.10g}" if shown else f"{name} {value:.10g}")


def _escaped(text: str) -> str:
    return text.replace("\\", r"\\").replace('"', r"\"").replace("\n", r"\n")
