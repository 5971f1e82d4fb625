"""Telling other programs what happened: signed messages to webhooks, tried again, never waited for.

Threads of their own follow the log and send; nothing else waits for them. A queue that is full, or
a receiver that stays away, costs messages, which are counted, and nothing more.
"""

from __future__ import annotations

import hashlib
import hmac
import json
import logging
import queue
import threading
import time
import urllib.error
import urllib.request
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from typing import Any, Final
from urllib.parse import urlsplit

from drystone.errors import InvalidSpec
from drystone.run.control.access import period_start
from drystone.run.control.admission import spent_since
from drystone.run.control.controller import Controller
from drystone.service.feed import event_view
from drystone.service.views import Job

KINDS: Final = ("Failed", "Finished", "Refused", "NodeLost")
SIGNATURE: Final = "Drystone-Signature"
SECRET_VARIABLE: Final = "DRYSTONE_WEBHOOK_SECRET"  # the name of a variable, no secret
_MAX_WAITING: Final = 1000
_TRIES: Final = 6
_TIMEOUT_SECONDS: Final = 10.0
_LOOK_SECONDS: Final = 30.0  # between looks at deadlines and budgets
_NEARLY: Final = 0.9  # of a budget
_LOG: Final = logging.getLogger(__name__)


@dataclass(frozen=True, slots=True)
class Target:
    """Where messages go, and in whose form."""

    url: str
    is_slack: bool = False

    @classmethod
    def parse(cls, text: str) -> Target:
        """An address; `slack+https://...`, or one of Slack's own, gets Slack's body."""
        is_slack = text.startswith("slack+")
        url = text.removeprefix("slack+")
        parts = urlsplit(url)
        if parts.scheme not in ("http", "https") or not parts.hostname:
            hint = "Write it like https://example.org/hook or slack+https://hooks.slack.com/..."
            raise InvalidSpec(f"{text!r} is not an address", where="--webhook", hint=hint)
        return cls(url, is_slack or parts.hostname == "hooks.slack.com")

    def body(self, message: dict[str, Any]) -> bytes:
        """What is sent."""
        shown = {"text": message["text"]} if self.is_slack else message
        return json.dumps(shown, separators=(",", ":"), allow_nan=False, default=str).encode()


def signature(secret: str, timestamp: int, body: bytes) -> str:
    """`t=...,v1=...`: a receiver computes the same over `t.body`, and looks how old t is."""
    signed = hmac.new(secret.encode(), f"{timestamp}.".encode() + body, hashlib.sha256)
    return f"t={timestamp},v1={signed.hexdigest()}"


class _NoRedirects(urllib.request.HTTPRedirectHandler):
    """A receiver that points elsewhere has failed: what is signed goes where it was meant to."""

    def redirect_request(self, *_: Any) -> None:
        return None


class Webhooks:
    """Follows the log until it is closed."""

    def __init__(self, controller: Controller, targets: Sequence[Target], secret: str = "") -> None:
        self._controller, self._secret = controller, secret
        self._seen = controller.journal.sequence
        self._told: set[tuple[str, str]] = set()  # what is told once: deadlines, budgets
        self._closing = threading.Event()
        self._open = urllib.request.build_opener(_NoRedirects).open
        self.num_sent = self.num_lost = 0
        self._queues: list[queue.Queue[dict[str, Any]]] = []
        for target in targets:
            waiting: queue.Queue[dict[str, Any]] = queue.Queue(_MAX_WAITING)
            self._queues.append(waiting)
            self._start(self._send_all, target, waiting)
        if targets:
            self._start(self._watch)

    def close(self) -> None:
        """Send nothing more."""
        self._closing.set()

    @staticmethod
    def _start(work: Any, *arguments: Any) -> None:
        threading.Thread(target=work, args=arguments, name="webhooks", daemon=True).start()

    def _watch(self) -> None:
        looked = 0.0
        while not self._closing.wait(0.5):
            try:
                for message in self._news():
                    self._put(message)
                if time.monotonic() - looked >= _LOOK_SECONDS:
                    looked = time.monotonic()
                    for message in self._risks():
                        self._put(message)
            except Exception:  # a database that is away: the next look finds it all
                _LOG.warning("webhooks: the log could not be read", exc_info=True)

    def _put(self, message: dict[str, Any]) -> None:
        for waiting in self._queues:
            try:
                waiting.put_nowait(message)
            except queue.Full:
                self.num_lost += 1

    def _news(self) -> Iterator[dict[str, Any]]:
        last = self._controller.journal.sequence
        lines = self._controller.store.read_log(after=self._seen, most=500, kinds=KINDS)
        for line in lines:
            event = event_view(line, is_open=False)
            name = self._name(line.job_id)
            yield {
                "id": f"event-{line.sequence}",
                "event": event["event"],
                "job_id": line.job_id,
                "time_seconds": event.get("time_seconds"),
                "reason": event.get("reason", ""),
                "text": f"{name}{event['told']}",
            }
            self._seen = line.sequence
        if len(lines) < 500:
            self._seen = max(self._seen, last)

    def _name(self, job_id: str) -> str:
        job = self._controller.journal.live.jobs.get(job_id)
        return f"Job {job_id} ({job.job.name}) " if job is not None else ""

    def _risks(self) -> Iterator[dict[str, Any]]:
        """Jobs that will miss their deadline, and teams that have nearly spent their budget."""
        journal, found = self._controller.journal, []
        with journal.lock:
            now, live = journal.now(), journal.live
            for record in live.state.active.values():
                job = Job.of(self._controller, record, now)
                late = (job.eta_seconds or now) - (job.deadline_seconds or float("inf"))
                if late > 0:
                    text = (
                        f"Job {job.id} ({job.name}) will miss its deadline by {late / 60:.0f} min"
                    )
                    found.append(("DeadlineAtRisk", job.id, text))
            for team in live.access.teams.values():
                if team.budget_dollars is None:
                    continue
                start = period_start(team.budget_period, now)
                spent = spent_since(live, team.name, start, now)
                if spent >= _NEARLY * team.budget_dollars:
                    text = (
                        f"Team {team.name} has spent ${spent:,.2f} of ${team.budget_dollars:,.2f}"
                    )
                    found.append(("BudgetNearlySpent", f"{team.name} {start:.0f}", text))
        for kind, what, text in found:
            if (kind, what) not in self._told:
                self._told.add((kind, what))
                yield {"id": f"{kind}-{what}", "event": kind, "time_seconds": now, "text": text}

    def _send_all(self, target: Target, waiting: queue.Queue[dict[str, Any]]) -> None:
        while not self._closing.is_set():
            try:
                message = waiting.get(timeout=0.5)
            except queue.Empty:
                continue
            if self._sent(target, message):
                self.num_sent += 1
            else:
                self.num_lost += 1

    def _sent(self, target: Target, message: dict[str, Any]) -> bool:
        body = target.body(message)
        for again in range(_TRIES):
            headers = {"Content-Type": "application/json", "Drystone-Delivery": message["id"]}
            if self._secret:
                headers[SIGNATURE] = signature(self._secret, int(time.time()), body)
            # `Target.parse` takes web addresses only.
            request = urllib.request.Request(target.url, data=body, headers=headers)  # noqa: S310
            try:
                with self._open(request, timeout=_TIMEOUT_SECONDS):
                    return True
            except urllib.error.HTTPError as error:
                error.close()
                if error.code < 500 and error.code not in (408, 429):
                    break  # it will not be taken another time either
            except (OSError, ValueError):
                pass
            if self._closing.wait(2.0**again):
                return False
        _LOG.warning("webhooks: %s was not taken by %s", message["id"], urlsplit(target.url).netloc)
        return False
