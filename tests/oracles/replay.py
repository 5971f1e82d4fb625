"""How long would a step take on devices of given speeds? The log of a step, replayed exactly.

Each rank's log (`Wire.log`) says in order what it computed, which collectives it began and for
which it waited. Replaying keeps one clock for each rank: compute takes what the device takes, a
collective ends when the last rank has begun it, the one before it has ended, and its time is over.
There is no noise, so ratios repeat to the last digit.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass

from drystone.errors import InvalidSpec
from drystone.run.train.collectives import Log, Started, Waited, Worked


@dataclass(frozen=True, slots=True, kw_only=True)
class Link:
    """What a collective over all ranks takes: a delay, and the time of its bytes."""

    latency_seconds: float = 0.0
    bandwidth_bytes_per_second: float = float("inf")

    def seconds(self, num_bytes: int) -> float:
        """Of one collective."""
        return self.latency_seconds + num_bytes / self.bandwidth_bytes_per_second


def replay(
    logs: Sequence[Log],
    speeds: Sequence[float],
    sample_seconds: Mapping[str, float],
    link: Link | None = None,
) -> list[float]:
    """When each rank is done, in seconds. `sample_seconds`: of a sample at speed 1, by kind."""
    if len(logs) != len(speeds):
        raise InvalidSpec(f"{len(logs)} logs and {len(speeds)} speeds")
    ranks = [_Rank(log, speed, sample_seconds) for log, speed in zip(logs, speeds, strict=True)]
    ends: dict[int, float] = {}
    last_end = 0.0
    is_over = False
    while not is_over:
        for rank in ranks:
            rank.run(ends)
        is_over = all(rank.is_over for rank in ranks)
        ready = set.intersection(*(set(rank.begun) - set(ends) for rank in ranks))
        if not ready and not is_over:
            raise InvalidSpec("the logs wait for collectives that not every rank has begun")
        for number in sorted(ready):
            begun = max(rank.begun[number].clock for rank in ranks)
            size = max(rank.begun[number].num_bytes for rank in ranks)
            last_end = max(begun, last_end) + (link or Link()).seconds(size)
            ends[number] = last_end
    return [rank.clock for rank in ranks]


@dataclass(frozen=True, slots=True)
class _Begun:
    clock: float
    num_bytes: int


class _Rank:
    """The clock of one rank, and how far its log is read."""

    def __init__(self, log: Log, speed: float, sample_seconds: Mapping[str, float]) -> None:
        self._log, self._speed, self._sample_seconds = log, speed, sample_seconds
        self._at = 0
        self.clock = 0.0
        self.begun: dict[int, _Begun] = {}

    @property
    def is_over(self) -> bool:
        return self._at == len(self._log)

    def run(self, ends: Mapping[int, float]) -> None:
        """On, until it waits for a collective whose end is not known yet."""
        first = min(
            (one.number for one in self._log if isinstance(one, Started)), default=0
        )  # logs need not begin with the first step
        while not self.is_over:
            match self._log[self._at]:
                case Worked(kind=kind, num_samples=num_samples):
                    cost = self._sample_seconds.get(kind, 0.0) * num_samples
                    self.clock += cost / self._speed
                case Started(number=number, num_bytes=num_bytes):
                    self.begun[number - first] = _Begun(self.clock, num_bytes)
                case Waited(number=number):
                    if number - first not in ends:
                        return
                    self.clock = max(self.clock, ends[number - first])
            self._at += 1


def fully_sharded_log(
    *, num_layers: int, num_micro_batches: int, micro_batch: int, layer_bytes: int
) -> Log:
    """The log of plain FSDP with accumulation, gradients reduced once, as FSDP2 orders it.

    Every micro-batch gathers every layer twice; the next gather is on its way while a layer is
    computed; recomputation is part of `backward`.
    """
    log: Log = []
    number = 0

    def begin(kind: str) -> int:
        nonlocal number
        log.append(Started(number, kind, layer_bytes))
        number += 1
        return number - 1

    order = list(range(num_layers))
    for micro in range(num_micro_batches):
        is_last = micro == num_micro_batches - 1
        for kind, layers in (("forward", order), ("backward", order[::-1])):
            pending = begin("gather")
            for index, _ in enumerate(layers):
                following = begin("gather") if index + 1 < len(layers) else pending
                log.append(Waited(pending))
                log.append(Worked(kind, micro_batch))
                if kind == "backward" and is_last:
                    begin("reduce")
                pending = following
            if kind == "forward":
                log.append(Worked("head", micro_batch))
    log.append(Waited(begin("sum")))
    return log
