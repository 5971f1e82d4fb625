"""Agents and training processes in virtual time, which faults may hit at any request."""

import json
import math
from dataclasses import dataclass, field
from pathlib import Path
from random import Random

from drystone.run.engines.agent.client import AgentGone, AgentRefused
from drystone.run.engines.agent.launches import LOST_EXIT
from drystone.run.engines.agent.network import RefusalKind
from drystone.run.engines.contract import Poll, Rendezvous, Seen
from drystone.run.fence import Fenced
from drystone.run.succession import find_successor, may_begin

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
    is_ready: bool = False  # a standby that has said so

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
    num_handed_over: int = 0
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
            is_replaced = request["is_standby"] and part.request["job_id"] == key[0]
            theirs = {rank["device"] for rank in part.request["ranks"]}
            if not part.is_over and not is_replaced and devices & theirs:
                raise AgentRefused("somebody is there", RefusalKind.BUSY)
        if key[1] > job.fence and not request["is_standby"]:
            self._raise_fence(key[0], key[1])
        exits = {rank["rank"]: None for rank in request["ranks"]}
        self.nodes[node][key] = Part(request, self.now + request["lease_seconds"], exits)
        return {}

    def _raise_fence(self, job_id: str, epoch: int) -> None:
        """A launch begins with what is saved: nothing of those before it runs any more."""
        for node, parts in self.nodes.items():
            older = [
                part for (one, number), part in parts.items() if one == job_id and number < epoch
            ]
            running = [part for part in older if not part.is_over]
            assert not running or node in self._unheard, f"job {job_id} runs twice"
        self.jobs[job_id].fence, self.jobs[job_id].is_begun = epoch, False

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
            self._stand_by(job_id, job)
            self._train(job_id, job, seconds)

    def _leave(self, part: Part, job: Training, epoch: int) -> None:
        is_first = bool(part.request["reports"])
        if part.saves and is_first and job.is_begun and job.fence == epoch:
            if self._hand_over(part, job, epoch):
                return
            job.saved = job.step
            part.report("checkpoint", job.step)
        part.end(-15)

    def _hand_over(self, part: Part, job: Training, epoch: int) -> bool:
        """To the launch that the controller has named, where that is there and takes the state."""
        job_id = part.request["job_id"]
        successor = find_successor(_folder(part), epoch)
        if successor is None:
            return False
        gang = self._gang(job_id, successor.epoch)
        if not _is_whole(gang) or not all(other.is_ready for other in gang):
            return False
        if self._faults.strike(0.2):  # it dies while it takes the state
            for other in gang:
                other.end(Fenced.exit_code)
            return False
        job.fence = successor.epoch
        job.num_handed_over += 1
        part.report("handed_over", job.step)
        for other in self._gang(job_id, epoch):
            other.end(0)
        self._tell(gang, "started", job.step)
        return True

    def _stand_by(self, job_id: str, job: Training) -> None:
        """Launches that wait for the one before them."""
        epochs = {epoch for parts in self.nodes.values() for one, epoch in parts if one == job_id}
        for epoch in sorted(epoch for epoch in epochs if epoch > job.fence):
            gang = self._gang(job_id, epoch)
            for part in gang:
                if part.leaves_at < math.inf:
                    part.end(Fenced.exit_code)
            if not _is_whole(gang):
                continue
            if not gang[0].is_ready and self._faults.random.random() < 0.5:  # it takes its time
                self._tell(gang, "ready", 0)
                for part in gang:
                    part.is_ready = True
            if may_begin(_folder(gang[0]), epoch):
                self._raise_fence(job_id, epoch)

    def _gang(self, job_id: str, epoch: int) -> list[Part]:
        found = [parts.get((job_id, epoch)) for parts in self.nodes.values()]
        return [part for part in found if part is not None]

    def _train(self, job_id: str, job: Training, seconds: int) -> None:
        """All ranks of the newest launch together, or none."""
        gang = self._gang(job_id, job.fence)
        if not _is_whole(gang) or any(part.leaves_at < math.inf for part in gang):
            return
        variables = gang[0].request["environment"]
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


def _is_whole(gang: list[Part]) -> bool:
    """Whether all ranks of a launch are there, and run."""
    if not gang or any(part.is_over for part in gang):
        return False
    num_ranks = sum(len(part.exits) for part in gang)
    return num_ranks >= int(gang[0].request["environment"]["WORLD_SIZE"])


def _folder(part: Part) -> Path:
    """Of the job, which all its launches see."""
    return Path(part.request["fence"]).parent
