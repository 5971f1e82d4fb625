"""Agents and training processes in virtual time, which faults may hit at any request."""

import json
import math
from dataclasses import dataclass, field
from random import Random

from drystone.run.engines.agent.client import AgentGone, AgentRefused
from drystone.run.engines.agent.launches import LOST_EXIT
from drystone.run.engines.agent.network import RefusalKind
from drystone.run.engines.contract import Poll, Rendezvous, Seen
from drystone.run.fence import Fenced

SAVE_EVERY = 5
POISON = (
    "\0\x1b[2J{}", '{"event": "step"', '{"event": "step", "step": 1e400, "loss": NaN}',
    '{"event": "step", "step": 1' + "0" * 400 + "}", '{"a":' * 3000, "x" * 70_000,
    '{"event": "step", "step": -3}', '{"event": "checkpoint", "step": "two"}', "\ud800",
)  # fmt: skip


class Killed(BaseException):
    """The controller is killed here."""


class Faults:
    """Which of them happen, by seed; none once `are_over`."""

    def __init__(self, seed: int) -> None:
        self.random, self.are_over = Random(seed), False

    def strike(self, share: float) -> bool:
        return not self.are_over and self.random.random() < share

    def maybe_kill(self) -> None:
        if self.strike(0.01):
            raise Killed


@dataclass
class Part:
    """What an agent knows of a launch on its node."""

    request: dict
    lease_ends: float
    exits: dict[int, int | None]
    reports: str = ""
    note: str = ""
    leaves_at: float = math.inf  # it was asked to
    saves: bool = False  # before it leaves

    @property
    def is_over(self) -> bool:
        return all(code is not None for code in self.exits.values())

    def end(self, code: int) -> None:
        self.exits = {rank: code if old is None else old for rank, old in self.exits.items()}

    def report(self, event: str, step: int, poison: str = "") -> None:
        if self.request["reports"]:
            self.reports += f"{poison}\n" if poison else ""
            self.reports += json.dumps({"event": event, "step": step}) + "\n"


@dataclass
class Training:
    """What is on the disk of a job, and what its newest launch has done."""

    fence: int = 0
    saved: int = 0
    step: int = 0
    is_begun: bool = False
    is_finished: bool = False
    ran: list[int] = field(default_factory=list)  # steps, each as often as it was done


class SimulatedAgents:
    """The engine: outlives controllers, as agents do."""

    trouble = ""

    def __init__(self, faults: Faults, nodes: list[str]) -> None:
        self._faults, self.now = faults, 1000.0
        self.nodes: dict[str, dict[tuple[str, int], Part]] = {node: {} for node in nodes}
        self._silent_until = dict.fromkeys(nodes, 0.0)
        self._unheard: set[str] = set()  # nodes that said nothing in the last round
        self.jobs: dict[str, Training] = {}
        self.controller = 0

    # --- what the controller asks ---------------------------------------------------------------

    def start(self, controller: int) -> None:
        assert controller > self.controller
        self.controller = controller

    def close(self) -> None: ...

    def held(self) -> frozenset:
        return frozenset()

    def reserve(self, key, gpus) -> bool:
        return True

    def rendezvous(self, node: str) -> Rendezvous:
        self._reach(node)
        return Rendezvous(address="127.0.0.1", port=20_000)

    def poll(self, offsets, renew, lease_seconds) -> Poll:
        self._faults.maybe_kill()
        silent = {node for node in self.nodes if self.is_silent(node) or self._faults.strike(0.03)}
        self._unheard = silent
        seen = []
        for node in sorted(self.nodes.keys() - silent):
            for key, part in self.nodes[node].items():
                if key in renew:
                    part.lease_ends = self.now + lease_seconds
                seen += self._seen(node, key, part, offsets.get(key, 0))
        self._faults.random.shuffle(seen)
        return Poll(tuple(seen), frozenset(silent))

    def ask(self, node: str, op: str, **values) -> dict:
        self._faults.maybe_kill()
        self._reach(node)
        if self._faults.strike(0.03):
            raise AgentGone("the request was lost")
        if self._faults.strike(0.02):
            getattr(self, f"_{op}")(node, **values)  # the request comes twice
        answer = getattr(self, f"_{op}")(node, **values)
        self._faults.maybe_kill()
        if self._faults.strike(0.03):
            raise AgentGone("the answer was lost")
        return answer

    def _reach(self, node: str) -> None:
        if self.is_silent(node):
            raise AgentGone(f"{node} does not answer")

    def is_silent(self, node: str) -> bool:
        return self.now < self._silent_until[node]

    def _seen(self, node: str, key, part: Part, offset: int) -> list[Seen]:
        text, is_over = part.reports[offset:], part.is_over
        if text and self._faults.strike(0.2):  # the rest, and the end, are told later
            text, is_over = text[: text.index("\n") + 1], False
        exits = part.exits if is_over else dict.fromkeys(part.exits)
        told = Seen(
            node=node, job_id=key[0], epoch=key[1], exits=exits, is_over=is_over, note=part.note,
            devices=tuple(rank["device"] for rank in part.request["ranks"]), reports=text,
            offset=offset + len(text),
        )  # fmt: skip
        return [told]

    def _launch(self, node: str, **request) -> dict:
        key = request["job_id"], request["epoch"]
        job = self.jobs.setdefault(key[0], Training())
        if key in self.nodes[node]:
            return {}  # asked again
        if key[1] < job.fence:
            raise AgentRefused("a later launch was made")
        if self._faults.strike(0.02):
            raise AgentRefused("No space left on device", RefusalKind.DISK_FULL)
        devices = {rank["device"] for rank in request["ranks"]}
        for part in self.nodes[node].values():
            if not part.is_over and devices & {rank["device"] for rank in part.request["ranks"]}:
                raise AgentRefused("somebody is there", RefusalKind.BUSY)
        for other, parts in self.nodes.items():
            older = [epoch for job_id, epoch in parts if job_id == key[0] and epoch < key[1]]
            running = [epoch for epoch in older if not parts[key[0], epoch].is_over]
            assert not running or other in self._unheard, f"job {key[0]} runs twice"
        if key[1] > job.fence:
            job.fence, job.is_begun = key[1], False
        exits = {rank["rank"]: None for rank in request["ranks"]}
        self.nodes[node][key] = Part(request, self.now + request["lease_seconds"], exits)
        return {}

    def _stop(self, node: str, *, job_id, epoch, grace_seconds, note) -> dict:
        part = self.nodes[node].get((job_id, epoch))
        if part is not None and not part.is_over:
            part.note, part.saves = note, grace_seconds > 0
            takes = self._faults.random.choice([0.5, 3.0, 15.0]) if part.saves else 0.0
            part.leaves_at = min(part.leaves_at, self.now + takes)
        return {}

    def _forget(self, node: str, *, job_id, epoch) -> dict:
        part = self.nodes[node].get((job_id, epoch))
        assert part is None or part.is_over, "what runs is forgotten"
        self.nodes[node].pop((job_id, epoch), None)
        return {}

    def _read_end(self, node: str, **_) -> dict:
        return {"text": ""}

    # --- what happens by itself -----------------------------------------------------------------

    def pass_time(self, seconds: int) -> None:
        self.now += seconds
        for node, parts in self.nodes.items():
            if not self.is_silent(node) and self._faults.strike(0.03):
                self._silent_until[node] = self.now + self._faults.random.choice([5, 30, 200])
                if self._faults.strike(0.5):  # it dies, and what ran there with it
                    for part in parts.values():
                        part.end(LOST_EXIT)
            for (job_id, epoch), part in parts.items():
                if not part.is_over and self._faults.strike(0.01):
                    part.end(-9)
                if not part.is_over and self.now >= part.leaves_at:
                    self._leave(part, self.jobs[job_id], epoch)
                if self.now > part.lease_ends or epoch < self.jobs[job_id].fence:
                    part.end(Fenced.exit_code)
        for job_id, job in self.jobs.items():
            self._train(job_id, job, seconds)

    def _leave(self, part: Part, job: Training, epoch: int) -> None:
        if part.saves and part.request["reports"] and job.is_begun and job.fence == epoch:
            job.saved = job.step
            part.report("checkpoint", job.step)
        part.end(-15)

    def _train(self, job_id: str, job: Training, seconds: int) -> None:
        """All ranks of the newest launch together, or none."""
        gang = [
            parts[job_id, job.fence]
            for parts in self.nodes.values()
            if (job_id, job.fence) in parts
        ]
        ranks = [rank for part in gang for rank in part.exits]
        if not gang or any(part.is_over or part.leaves_at < math.inf for part in gang):
            return
        variables = gang[0].request["environment"]
        if len(ranks) < int(variables["WORLD_SIZE"]):
            return  # the others are not there yet
        if not job.is_begun:
            job.is_begun, job.step = True, job.saved
            self._tell(gang, "started", job.step)
        last = int(variables["DRYSTONE_STEPS"])
        for _ in range(min(seconds, last - job.step)):
            job.step += 1
            job.ran.append(job.step)
            self._tell(gang, "step", job.step)
            if job.step % SAVE_EVERY == 0 or job.step == last:
                job.saved = job.step
                self._tell(gang, "checkpoint", job.step)
        if job.step == last:  # also if nobody heard of it the first time
            job.is_finished = True
            self._tell(gang, "finished", job.step)
            for part in gang:
                part.end(0)

    def _tell(self, gang: list[Part], event: str, step: int) -> None:
        for part in gang:
            is_bad = self._faults.strike(0.02)
            part.report(event, step, self._faults.random.choice(POISON) if is_bad else "")
