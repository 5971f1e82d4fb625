"""Gather and reduce pieces of unequal size, on gloo and NCCL, counting what is sent.

A flat tensor of N elements is divided among the ranks by `cuts`: rank r owns `[cuts[r],
cuts[r+1])`, which may be empty. Every form gives the same result; which is fastest depends on the
backend, on the sizes and on how unequal they are (docs/runtime.md,
`benchmarks/runtime_collectives.py`).
"""

from __future__ import annotations

import faulthandler
from collections import Counter
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass, field
from datetime import timedelta
from enum import StrEnum
from functools import partial
from itertools import pairwise
from typing import Any, Final

import torch
import torch.distributed as dist
from torch.distributed.distributed_c10d import _coalescing_manager

from drystone.run.train.emulate import resize_storage

# On NCCL one padded call is taken to be cheaper below this than a call for each rank, since latency
# outweighs volume. Beyond it, the table that padding needs would be as large as the layer itself.
# Reasoned, not measured: no GPU was at hand.
SMALL_BYTES = 32 * 1024


class Form(StrEnum):
    """How a collective over pieces is carried out."""

    EVEN = "even"  # the backend's own collective for equal pieces
    PADDED = "padded"  # the same, every piece as long as the longest
    GROUPED = "grouped"  # one broadcast, or one reduction, for each owner
    SPLIT = "split"  # all-to-all with unequal splits, then a local sum in the order of ranks


@dataclass(slots=True)
class Traffic:
    """What this rank took part in and sent, by kind; `payload_bytes` counts what must leave it."""

    calls: Counter[str] = field(default_factory=Counter)
    payload_bytes: Counter[str] = field(default_factory=Counter)

    def count(self, kind: str, payload_bytes: int) -> None:
        """One more collective."""
        self.calls[kind] += 1
        self.payload_bytes[kind] += payload_bytes


@dataclass(frozen=True, slots=True)
class Worked:
    """Of the log: a section of compute, of so many samples."""

    kind: str
    num_samples: int


@dataclass(frozen=True, slots=True)
class Started:
    """Of the log: a collective was begun; the same number means the same one on every rank."""

    number: int
    kind: str
    num_bytes: int  # of the whole tensor


@dataclass(frozen=True, slots=True)
class Waited:
    """Of the log: nothing more until that collective has ended."""

    number: int


Log = list[Worked | Started | Waited]


class Pending:
    """A collective on its way; `wait` ends it, once."""

    def __init__(
        self,
        works: Sequence[Any],  # with a method `wait`
        finish: Callable[[], object],
        *,
        waited: Callable[[], None] | None = None,
    ) -> None:
        self._works, self._finish, self._waited = list(works), finish, waited

    def wait(self) -> None:
        """Until the result is there."""
        if self._waited is not None:
            self._waited()
            self._waited = None
        for work in self._works:
            work.wait()
        self._works = []
        self._finish()
        self._finish = _nothing


@contextmanager
def ends_within(timeout: timedelta | None) -> Iterator[None]:
    """End the process if what is inside takes longer.

    When a rank dies while all connect to each other, gloo was seen to try on for five times its
    timeout; no exception reaches a thread that waits there.
    """
    if timeout is None:
        yield
        return
    seconds = timeout.total_seconds() + 1.0  # whoever gives up in time may say why
    faulthandler.dump_traceback_later(seconds, exit=True, file=2)  # standard error
    try:
        yield
    finally:
        faulthandler.cancel_dump_traceback_later()


STORAGE_TIMEOUT: Final = timedelta(hours=6)


class Wire:
    """The process group, for unequal pieces. Every rank calls in the same order."""

    def __init__(
        self, group: dist.ProcessGroup | None = None, *, timeout: timedelta | None = None
    ) -> None:
        self.group, self._timeout = group, timeout
        self.is_alone = not dist.is_initialized()
        self.rank = 0 if self.is_alone else dist.get_rank(group)
        self.num_ranks = 1 if self.is_alone else dist.get_world_size(group)
        self.backend = "none" if self.is_alone else dist.get_backend(group)
        self.traffic = Traffic()
        self.log: Log | None = None  # filled where it is a list; `tests/oracles/replay.py` reads it
        self._num_started = 0
        self._storage: Wire | None = None

    def make_group(
        self,
        ranks: Sequence[int] | None = None,
        *,
        backend: str | None = None,
        timeout: timedelta | None = None,
    ) -> dist.ProcessGroup:
        """Some of the ranks, or all; every rank calls. It waits as long as this one does."""
        some = None if ranks is None else list(ranks)
        with ends_within(self._timeout):
            return dist.new_group(some, backend=backend, timeout=timeout or self._timeout)

    def for_storage(self) -> Wire:
        """The same ranks for work on files: on the host, and patient; every rank calls.

        A rank with little state waits for those with much while they write. That one died is
        noticed all the same, because its connection breaks; a rank that hangs is noticed by whoever
        reads its reports.
        """
        if self.is_alone:
            return self
        if self._storage is None:
            group = self.make_group(backend="gloo", timeout=STORAGE_TIMEOUT)
            self._storage = Wire(group, timeout=STORAGE_TIMEOUT)
        return self._storage

    def gather(
        self,
        piece: torch.Tensor,
        flat: torch.Tensor,
        cuts: Sequence[int],
        form: Form | None = None,
    ) -> Pending:
        """Fill `flat` from every rank's `piece`; both are 1-D and of one dtype."""
        return self._noted("gather", flat.nbytes, self._gather(piece, flat, cuts, form))

    def _gather(
        self, piece: torch.Tensor, flat: torch.Tensor, cuts: Sequence[int], form: Form | None
    ) -> Pending:
        if not flat.numel():
            return Pending((), _nothing)
        self.traffic.count("gather", piece.nbytes * (self.num_ranks - 1))
        sizes = [end - start for start, end in pairwise(cuts)]
        if self.num_ranks == 1:
            flat.copy_(piece)
            return Pending((), _nothing)
        match form or choose_gather(sizes, flat.element_size(), self.backend):
            case Form.EVEN:
                work = dist.all_gather_single(flat, piece, group=self.group, async_op=True)
                return Pending([work], _nothing)
            case Form.PADDED:
                return self._gather_padded(piece, flat, sizes)
            case _:
                flat[cuts[self.rank] : cuts[self.rank + 1]].copy_(piece)
                return Pending(self._for_each_owner(_broadcast, flat, cuts), _nothing)

    def reduce(
        self,
        flat: torch.Tensor,
        out: torch.Tensor,
        cuts: Sequence[int],
        form: Form | None = None,
    ) -> Pending:
        """Sum `flat` over the ranks; `out`, a tensor of its own, gets this rank's piece of it.

        `flat` is not what it was afterwards: pieces may be summed in their place.
        """
        return self._noted("reduce", flat.nbytes, self._reduce(flat, out, cuts, form))

    def _reduce(
        self, flat: torch.Tensor, out: torch.Tensor, cuts: Sequence[int], form: Form | None
    ) -> Pending:
        if not flat.numel():
            return Pending((), _nothing)
        self.traffic.count("reduce", flat.nbytes - out.nbytes)
        sizes = [end - start for start, end in pairwise(cuts)]
        if self.num_ranks == 1:
            out.copy_(flat)
            return Pending((), _nothing)
        match form or choose_reduce(sizes, flat.element_size(), self.backend):
            case Form.EVEN:
                work = dist.reduce_scatter_single(out, flat, group=self.group, async_op=True)
                return Pending([work], _nothing)
            case Form.PADDED:
                return self._reduce_padded(flat, out, sizes)
            case Form.SPLIT:
                return self._reduce_split(flat, out, sizes)
            case _:
                works = self._for_each_owner(_reduce, flat, cuts)
                mine = flat[cuts[self.rank] : cuts[self.rank + 1]]
                return Pending(works, partial(out.copy_, mine))

    def sum(self, values: torch.Tensor, *, kind: str = "sum") -> Pending:
        """Sum over all ranks, in place: a few numbers, or gradients that every rank wants."""
        self.traffic.count(kind, values.nbytes)
        if self.num_ranks == 1:
            return self._noted(kind, values.nbytes, Pending((), _nothing))
        work = dist.all_reduce(values, group=self.group, async_op=True)
        return self._noted(kind, values.nbytes, Pending([work], _nothing))

    def barrier(self) -> None:
        """Until every rank is here."""
        if not self.is_alone:
            dist.barrier(group=self.group)

    def read(self, values: torch.Tensor) -> list[float]:
        """The numbers of a tensor."""
        numbers: list[float] = values.tolist()
        return numbers

    def _noted(self, kind: str, num_bytes: int, pending: Pending) -> Pending:
        """The same, with its beginning and its end in the log, where there is one."""
        if self.log is None:
            return pending
        log, number = self.log, self._num_started
        self._num_started += 1
        log.append(Started(number, kind, num_bytes))
        return Pending((), pending.wait, waited=lambda: log.append(Waited(number)))

    def _for_each_owner(
        self, call: Callable[..., object], flat: torch.Tensor, cuts: Sequence[int]
    ) -> list[Any]:
        """One collective for each piece that is not empty; on NCCL all of them in one launch."""
        pieces = [
            (owner, flat[start:end])
            for owner, (start, end) in enumerate(pairwise(cuts))
            if end > start
        ]
        if self.backend == "gloo":  # which has no groups of calls
            return [call(piece, owner, self.group) for owner, piece in pieces]
        with _coalescing_manager(self.group, device=flat.device, async_ops=True) as grouped:
            for owner, piece in pieces:
                call(piece, owner, self.group)
        return [grouped]

    def _gather_padded(
        self, piece: torch.Tensor, flat: torch.Tensor, sizes: Sequence[int]
    ) -> Pending:
        longest = max(sizes)
        mine = flat.new_zeros(longest)
        mine[: piece.numel()] = piece
        table = flat.new_empty(self.num_ranks * longest)
        work = dist.all_gather_single(table, mine, group=self.group, async_op=True)

        def finish() -> None:
            nonlocal mine
            del mine  # it was read until here, and must be seen until here
            rows = table.view(self.num_ranks, longest)
            for part, row in zip(flat.split(list(sizes)), rows, strict=True):
                part.copy_(row[: part.numel()])

        return Pending([work], finish)

    def _reduce_padded(
        self, flat: torch.Tensor, out: torch.Tensor, sizes: Sequence[int]
    ) -> Pending:
        longest = max(sizes)
        table = flat.new_zeros(self.num_ranks, longest)
        for part, row in zip(flat.split(list(sizes)), table, strict=True):
            row[: part.numel()] = part
        mine = flat.new_empty(longest)
        work = dist.reduce_scatter_single(mine, table.view(-1), group=self.group, async_op=True)

        def finish() -> None:
            nonlocal table
            del table  # it was read until here, and must be seen until here
            out.copy_(mine[: out.numel()])

        return Pending([work], finish)

    def _reduce_split(self, flat: torch.Tensor, out: torch.Tensor, sizes: Sequence[int]) -> Pending:
        num_elements, num_bytes = out.numel(), out.nbytes
        resize_storage(out, 0)  # the sum takes memory when it is made, not while the table fills
        table = flat.new_empty(self.num_ranks, num_elements)
        work = dist.all_to_all_single(
            table.view(-1),
            flat,
            output_split_sizes=[num_elements] * self.num_ranks,
            input_split_sizes=list(sizes),
            group=self.group,
            async_op=True,
        )

        def finish() -> None:
            resize_storage(out, num_bytes)
            torch.sum(table, 0, out=out)

        return Pending([work], finish)


def _broadcast(piece: torch.Tensor, owner: int, group: dist.ProcessGroup | None) -> object:
    return dist.broadcast(piece, group_src=owner, group=group, async_op=True)


def _reduce(piece: torch.Tensor, owner: int, group: dist.ProcessGroup | None) -> object:
    return dist.reduce(piece, group_dst=owner, group=group, async_op=True)


def choose_gather(sizes: Sequence[int], element_bytes: int, backend: str) -> Form:
    """The form to gather pieces of these sizes with."""
    if len(set(sizes)) == 1:
        return Form.EVEN
    if backend == "gloo":
        return Form.GROUPED  # measured: as fast for a few kilobytes, faster from there on
    if sum(sizes) * element_bytes <= SMALL_BYTES:
        return Form.PADDED
    return Form.GROUPED


def choose_reduce(sizes: Sequence[int], element_bytes: int, backend: str) -> Form:
    """The form to reduce pieces of these sizes with."""
    if backend == "gloo":
        # gloo's own reduce-scatter is an all-reduce: twice the bytes, equal pieces or not.
        return Form.SPLIT
    if len(set(sizes)) == 1:
        return Form.EVEN
    if sum(sizes) * element_bytes <= SMALL_BYTES:
        return Form.PADDED
    return Form.GROUPED


def _nothing() -> None:
    pass
