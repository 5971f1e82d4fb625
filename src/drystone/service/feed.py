"""Live state for many browsers: each change is looked at, and written as text, once for all.

One thread waits for the log to grow. While anybody listens, one task turns what happened into
messages a few times a second and hands the same bytes to every listener. Everything here is public
among those who may look at all; what is only for a team is asked for by itself.
"""

from __future__ import annotations

import asyncio
import contextlib
import threading
from collections import Counter
from collections.abc import AsyncIterator, Callable
from typing import Any, Final

from pydantic import BaseModel, ConfigDict

from drystone.run.control.controller import Controller
from drystone.run.control.store import LogLine
from drystone.run.events import load_line
from drystone.run.lifecycle import JobState
from drystone.service.answers import LOG, to_json
from drystone.service.auth.callers import Caller, may_touch
from drystone.service.sentences import phrase_of
from drystone.service.shapes import Shape
from drystone.service.views import Cluster, Job, Node, money_now

_PUBLIC_KEYS: Final = ("name", "owner", "team", "model", "priority", "num_steps")


def event_view(line: LogLine, *, is_open: bool) -> Table:
    """One event. `is_open`: for those who may read the job's logs and its description."""
    event: Table = load_line(line.body)
    job, reason = event.get("job"), event.get("reason")
    event.pop("secret_sha256", None)
    event.pop("client_key", None)
    if isinstance(job, dict) and "environment" in job:
        # A job's variables may hold secrets; its team sees their names.
        names = [name for name, _ in job["environment"]]
        shown = {key: job[key] for key in _PUBLIC_KEYS if key in job}
        event["job"] = job | {"environment": names} if is_open else shown
    if isinstance(reason, str) and not is_open:
        event["reason"] = reason.partition("\n")[0]  # the end of a log may follow
    told = phrase_of(event)
    return {"sequence": line.sequence, "actor": line.actor, "told": told, **event}


def events_for(controller: Controller, caller: Caller, lines: list[LogLine]) -> list[Table]:
    """Events as one caller may see them."""
    jobs = controller.journal.live.jobs
    rows = []
    for line in lines:
        job = jobs.get(line.job_id)
        team = job.job.team if job is not None else ""
        rows.append(event_view(line, is_open=may_touch(caller, team)))
    return rows


Table = dict[str, Any]
Chunk = tuple[int, bytes]  # up to which sequence number, and the text
_PACE_SECONDS: Final = 0.25  # between looks at the log
_PROGRESS_SECONDS: Final = 2.0
_TICK_SECONDS: Final = 5.0
_MAX_MISSED: Final = 2000  # events that are sent again to who comes back
_MAX_WAITING: Final = 200  # messages for a listener that does not read
_MAX_ROWS: Final = 500  # of jobs in one message


def message(kind: str, sequence: int, data: Table) -> bytes:
    """One server-sent event."""
    return b"event: %b\nid: %d\ndata: %b\n\n" % (kind.encode(), sequence, to_json(data))


class Happening(BaseModel):
    """One event; what else it has depends on its kind."""

    model_config = ConfigDict(extra="allow")

    sequence: int
    event: str
    time_seconds: float
    actor: str
    told: str  # in words; of a job, what follows after "Job 7"


class Happenings(Shape):
    """Events, oldest first."""

    events: list[Happening]
    last: int


class Feed:
    """What happens, for everybody who listens."""

    def __init__(self, controller: Controller) -> None:
        self._controller, self._journal = controller, controller.journal
        self._queues: set[asyncio.Queue[Chunk | None]] = set()
        self._woken: asyncio.Event | None = None
        self._task: asyncio.Task[None] | None = None
        self._sent = 0  # the sequence number that everybody has
        self._rows: dict[str, tuple[Any, ...]] = {}  # of progress, as they were sent
        self._nodes: dict[str, Node] = {}
        self._missed: dict[tuple[int, int], bytes] = {}  # what was made for who came back
        self.is_closing = False

    @property
    def num_listeners(self) -> int:
        """Who listens now."""
        return len(self._queues)

    @staticmethod
    def clock() -> Callable[[], float]:
        """The clock that waiting goes by."""
        return asyncio.get_running_loop().time

    async def wait(self, sequence: int, seconds: float) -> None:
        """Until the log is longer than that, or the time is over."""
        loop = asyncio.get_running_loop()
        deadline = loop.time() + seconds
        while self._journal.sequence <= sequence and not self.is_closing:
            left = deadline - loop.time()
            if left <= 0:
                return
            woken = self._watched()
            with contextlib.suppress(TimeoutError):
                await asyncio.wait_for(woken.wait(), left)

    async def listen(
        self, after: int | None, is_welcome: Callable[[], bool]
    ) -> AsyncIterator[bytes]:
        """Messages for one listener, who has seen everything up to `after`; None: nothing yet.

        Ends when the listener is no longer welcome, or too slow: it may come back.
        """
        queue: asyncio.Queue[Chunk | None] = asyncio.Queue(_MAX_WAITING)
        self._queues.add(queue)
        self._watched()
        if self._task is None:
            self._sent = self._journal.sequence
            self._task = asyncio.create_task(self._publish())
        begun = self._sent  # whatever is handed out from now on begins right after it
        try:
            yield await asyncio.to_thread(self._welcome, after, begun)
            while (chunk := await queue.get()) is not None and is_welcome():
                yield chunk[1]
        finally:
            self._queues.discard(queue)

    def close(self) -> None:
        """Let everybody go; from the thread of the event loop."""
        self.is_closing = True
        for queue in list(self._queues):
            self._drop(queue)
        if self._woken is not None:
            self._woken.set()

    # --- inside ---------------------------------------------------------------------------------

    def _watched(self) -> asyncio.Event:
        """What is set when the log has grown; the thread that sets it starts with the first."""
        if self._woken is None:
            self._woken = asyncio.Event()
            loop = asyncio.get_running_loop()
            threading.Thread(target=self._watch, args=(loop,), name="feed", daemon=True).start()
        return self._woken

    def _watch(self, loop: asyncio.AbstractEventLoop) -> None:
        seen = self._journal.sequence
        while not self.is_closing:
            with self._journal.lock:
                if self._journal.sequence <= seen:
                    self._journal.changed.wait(1.0)
                grown, seen = self._journal.sequence > seen, self._journal.sequence
            if grown:
                with contextlib.suppress(RuntimeError):  # the loop has ended
                    loop.call_soon_threadsafe(self._wake)

    def _wake(self) -> None:
        """Everybody who waits looks once."""
        if self._woken is not None:
            self._woken.set()
            if not self.is_closing:
                self._woken.clear()

    async def _publish(self) -> None:
        """Look, write once, hand to all; until nobody listens."""
        loop = asyncio.get_running_loop()
        told = ticked = loop.time()
        try:
            while self._queues and not self.is_closing:
                now = loop.time()
                has_progress = now - told >= _PROGRESS_SECONDS
                has_tick = now - ticked >= _TICK_SECONDS
                told, ticked = now if has_progress else told, now if has_tick else ticked
                if has_progress or has_tick or self._journal.sequence > self._sent:
                    made = await asyncio.to_thread(self._news, has_progress, has_tick)
                    if made is not None:
                        self._hand_out(made)
                await asyncio.sleep(_PACE_SECONDS)
        except Exception:
            LOG.exception("the live feed failed; whoever listens connects again")
            for queue in list(self._queues):
                self._drop(queue)
        finally:
            self._task = None

    def _hand_out(self, chunk: Chunk) -> None:
        """To everybody, and only then it is sent: who comes meanwhile gets it too."""
        self._sent = chunk[0]
        for queue in list(self._queues):
            try:
                queue.put_nowait(chunk)
            except asyncio.QueueFull:
                self._drop(queue)

    def _drop(self, queue: asyncio.Queue[Chunk | None]) -> None:
        self._queues.discard(queue)
        while not queue.empty():
            queue.get_nowait()
        queue.put_nowait(None)

    def _news(self, has_progress: bool, has_tick: bool) -> Chunk | None:
        """What happened since the last time, as one text."""
        parts: list[bytes] = []
        with self._journal.lock:
            last = self._journal.sequence
        if last > self._sent:
            lines = self._controller.store.read_log(after=self._sent, most=_MAX_MISSED)
            last = lines[-1].sequence if lines else last
            parts += self._changes(lines, last)
        if has_progress and (moved := self._progress(last)) is not None:
            parts.append(moved)
        if has_tick:
            parts.append(message("tick", last, self._tick()))
        return (last, b"".join(parts)) if parts else None

    def _changes(self, lines: list[LogLine], last: int) -> list[bytes]:
        told = [event_view(line, is_open=False) for line in lines]
        names = {line.job_id for line in lines if line.job_id}
        parts = [message("events", last, {"events": told})]
        with self._journal.lock:
            jobs = self._jobs(names)
            nodes = self._changed_nodes()
        parts.append(message("jobs", last, jobs))
        if nodes is not None:
            parts.append(message("cluster", last, nodes))
        return parts

    def _jobs(self, names: set[str]) -> Table:
        state, now = self._journal.live.state, self._journal.now()
        known = [state.jobs[name] for name in sorted(names) if name in state.jobs][:_MAX_ROWS]
        counts = Counter(record.state for record in state.jobs.values())
        return {
            "jobs": [Job.of(self._controller, record, now) for record in known],
            "num_by_state": {state.value: counts[state] for state in JobState},
            "now_seconds": now,
        }

    def _changed_nodes(self) -> Table | None:
        cluster = Cluster.of(self._controller, self._journal.now())
        nodes = {node.id: node for node in cluster.nodes}
        changed = [node for name, node in nodes.items() if self._nodes.get(name) != node]
        self._nodes = nodes
        return {"nodes": changed, "gpus": cluster.gpus} if changed else None

    def _progress(self, last: int) -> bytes | None:
        """Running jobs that got further."""
        with self._journal.lock:
            now, active = self._journal.now(), self._journal.live.state.active
            jobs = [
                Job.of(self._controller, record, now)
                for record in active.values()
                if record.num_gpus
            ]
            money = money_now(self._controller, now)
        rows: dict[str, tuple[Any, ...]] = {}
        for job in jobs:
            rows[job.id] = (
                job.step,
                _short(job.progress),
                _short(job.loss),
                _short(job.step_seconds),
                round(job.eta_seconds) if job.eta_seconds is not None else None,
                _short(job.dollars),
            )
        changed = [[name, *row] for name, row in rows.items() if self._rows.get(name) != row]
        self._rows = rows
        if not changed:
            return None
        return message("progress", last, {"rows": changed, **money, "now_seconds": now})

    def _tick(self) -> Table:
        return {
            "now_seconds": self._journal.now(),
            "sequence": self._journal.sequence,
            "decision_seconds": self._controller.decision_seconds,
            "last_error": self._controller.last_error,
        }

    def _welcome(self, after: int | None, last: int) -> bytes:
        """The first message of a connection, with what was missed where that is little."""
        is_resumed = after is not None and 0 <= last - after <= _MAX_MISSED
        hello = {
            "sequence": last,
            "epoch": self._journal.lease.epoch,
            "is_resumed": is_resumed,
            "now_seconds": self._journal.now(),
        }
        text = b"retry: 2000\n\n" + message("hello", last, hello)
        if not is_resumed or after is None or after == last:
            return text
        missed = self._missed.get((after, last))
        if missed is None:
            lines = self._controller.store.read_log(after=after, most=_MAX_MISSED)
            lines = [line for line in lines if line.sequence <= last]
            told = [event_view(line, is_open=False) for line in lines]
            with self._journal.lock:
                jobs = self._jobs({line.job_id for line in lines})
                cluster = Cluster.of(self._controller, self._journal.now())
            missed = message("events", last, {"events": told}) + message("jobs", last, jobs)
            missed += message("cluster", last, {"nodes": cluster.nodes, "gpus": cluster.gpus})
            self._missed = {(after, last): missed}
        return text + missed


def _short(value: float | None) -> float | None:
    """Five digits are enough to show."""
    return None if value is None else float(f"{value:.5g}")
