"""A process group for tests: real communication over gloo, under the rules of NCCL.

gloo forgives what NCCL does not: messages have tags and buffers, and every pair of ranks is
connected from the start. What passes there can hang on GPUs. The rules, from the documentation of
`torch.distributed` 2.13 (`isend`, `batch_isend_irecv`, `new_group`) and from `ProcessGroupNCCL`
without `device_id`:

1. The first message of a pair of ranks in a group creates a communicator of the two, the first
   collective one of the whole group; each blocks the calling thread until all its ranks are there.
2. A pair has one stream for both directions, the collectives of a group have another. Operations of
   a stream run in the order of the calls, one after another.
3. A send ends when its receive runs, and not before. Tags mean nothing.
4. No rank sends to itself.
5. All ranks of a group call the same collectives, of the same sizes, in the same order.
6. No collective of nothing, and none over pieces of unequal size but the all-to-all: neither is
   promised.
7. What is received may be used after `wait` only, and what is sent must stay as it is until then.

A broken rule raises `BrokenRule` where it can be seen, else whoever waits does so after the timeout
of the group. The backend `nccl_one_stream` is stricter by NCCL's rule for several communicators in
use at a time, that all ranks launch operations in one global order: there all groups of a rank
share one stream. Two differences to NCCL, both on the strict side: `wait` blocks the thread and not
a CUDA stream, and `batch_isend_irecv` is taken as the single calls that it consists of.
"""

from collections.abc import Callable, Sequence
from concurrent.futures import Future, ThreadPoolExecutor
from datetime import timedelta
from typing import Any

import torch
import torch.distributed as dist
from torch.utils._pytree import tree_leaves, tree_map

NCCL_RULES, NCCL_ONE_STREAM = "nccl_rules", "nccl_one_stream"

Tensors = list[torch.Tensor]
Run = Callable[[Any, Any], dist.Work | None]

_HEADER, _DATA = 1, 2  # tags on gloo
_SEND, _RECEIVE = 0, 1
_SIGNATURE_BYTES = 96


class BrokenRule(RuntimeError):
    """On NCCL this would hang, or compute with garbage."""


def register(max_wait: timedelta) -> None:
    """Make the backends known to `dist.init_process_group` and `dist.new_group`.

    Whoever waits for another rank for longer than that hangs, whatever the group's own timeout.
    """
    shared = Stream("shared")

    def register_backend(name: str, make_stream: Callable[[str], Stream]) -> None:
        def make(store: dist.Store, rank: int, size: int, timeout: timedelta) -> NcclRules:
            return NcclRules(store, rank, size, min(timeout, max_wait), make_stream)

        dist.Backend.register_backend(name, make, devices=["cpu"])

    register_backend(NCCL_RULES, Stream)
    register_backend(NCCL_ONE_STREAM, lambda _: shared)


class Stream:
    """Runs operations one after another, as a CUDA stream does."""

    def __init__(self, name: str) -> None:
        self._thread = ThreadPoolExecutor(1, thread_name_prefix=name)

    def launch(self, operation: Callable[[], None]) -> Future[None]:
        """Run it after all that were launched before."""
        return self._thread.submit(operation)


class Operation(dist.Work):
    """One operation on its way: its results are where they belong once it was waited for."""

    def __init__(
        self,
        name: str,
        future: Future[None],
        *,
        read: Sequence[tuple[torch.Tensor, torch.Tensor]],
        written: Sequence[tuple[torch.Tensor, torch.Tensor]],
    ) -> None:
        super().__init__()
        self._name, self._future = name, future
        self._read, self._written = list(read), list(written)

    def wait(self, timeout: timedelta | None = None) -> bool:
        self._future.result()
        self._check_read()
        for tensor, result in self._written:
            tensor.data.copy_(result)
        self._written = []
        return True

    def is_completed(self) -> bool:
        if not self._future.done():
            return False
        self._check_read()
        return True

    def _check_read(self) -> None:
        for tensor, copy in self._read:
            if not _same_bytes(tensor, copy):
                raise BrokenRule(f"{self._name}: what it reads changed before it was waited for")
        self._read = []


class Group(dist.Work):
    """Operations that are launched together: none has ended before all have."""

    def __init__(self, operations: Sequence[Operation]) -> None:
        super().__init__()
        self._operations = list(operations)

    def wait(self, timeout: timedelta | None = None) -> bool:
        for operation in self._operations:
            operation.wait()
        return True

    def is_completed(self) -> bool:
        return all(operation.is_completed() for operation in self._operations)


class NcclRules(dist.ProcessGroup):
    """The group of some ranks, as one of them sees it."""

    def __init__(
        self,
        store: dist.Store,
        rank: int,
        size: int,
        timeout: timedelta,
        make_stream: Callable[[str], Stream],
    ) -> None:
        super().__init__(rank, size)
        self._store, self._rank, self._size, self._timeout = store, rank, size, timeout
        self._gloo = dist.ProcessGroupGloo(store, rank, size, timeout)
        self._make_stream = make_stream
        self._streams: dict[str, Stream] = {}  # by communicator
        self._grouped: list[Operation] | None = None

    def getBackendName(self) -> str:  # noqa: N802  # torch's name
        return NCCL_RULES

    @property
    def group_name(self) -> str:
        return dist.distributed_c10d._world.pg_names[self]

    def _start_coalescing(self, device: torch.device) -> None:
        self._grouped = []

    def _end_coalescing(self, device: torch.device) -> dist.Work:
        grouped, self._grouped = self._grouped, None
        assert grouped, "NCCL has nothing to wait for in an empty group"
        return Group(grouped)

    # Between two ranks

    def send(self, tensors: Tensors, dst: int, tag: int) -> dist.Work:
        (tensor,) = tensors
        name = self._name(f"send of {tensor.nbytes} bytes to rank {dst}")
        stream, copy = self._pair_stream(dst, name), tensor.detach().clone()

        def run() -> None:
            self._meet(dst, _SEND, copy.nbytes, name)
            self._gloo.send([copy], dst, _DATA).wait()

        return Operation(name, stream.launch(run), read=[(tensor, copy)], written=())

    def recv(self, tensors: Tensors, src: int, tag: int) -> dist.Work:
        (tensor,) = tensors
        name = self._name(f"receive of {tensor.nbytes} bytes from rank {src}")
        stream, result = self._pair_stream(src, name), torch.empty_like(tensor)
        _spoil(tensor)

        def run() -> None:
            self._meet(src, _RECEIVE, result.nbytes, name)
            self._gloo.recv([result], src, _DATA).wait()

        return Operation(name, stream.launch(run), read=(), written=[(tensor, result)])

    def _pair_stream(self, peer: int, name: str) -> Stream:
        if peer == self._rank:
            raise BrokenRule(f"{name}: a rank cannot send to itself")
        pair = sorted((self._rank, peer))
        return self._stream(f"pair {pair}", pair, name)

    def _meet(self, peer: int, kind: int, num_bytes: int, name: str) -> None:
        """Until the other rank is at its end of the same message."""
        mine, theirs = torch.tensor([kind, num_bytes]), torch.zeros(2, dtype=torch.long)
        sent = self._gloo.send([mine], peer, _HEADER)
        try:
            self._gloo.recv([theirs], peer, _HEADER).wait(self._timeout)
            sent.wait(self._timeout)
        except RuntimeError as error:
            raise BrokenRule(f"{name}: waits for rank {peer} for ever ({error})") from error
        other_kind, other_bytes = theirs.tolist()
        if other_kind == kind:
            raise BrokenRule(
                f"{name}: rank {peer} does the same at this place of the pair's stream, "
                "so both wait for ever"
            )
        if other_bytes != num_bytes:
            raise BrokenRule(f"{name}: met one of {other_bytes} bytes, so the orders differ")

    # Among all ranks

    def allreduce(self, tensors: Tensors, opts: Any) -> dist.Work:
        return self._collective(
            "all-reduce", lambda out, _: self._gloo.allreduce(out, opts), tensors, same=tensors
        )

    def allreduce_coalesced(self, tensors: Tensors, opts: Any) -> dist.Work:
        return self._collective(
            "coalesced all-reduce",
            lambda out, _: self._gloo.allreduce_coalesced(out, opts),
            tensors,
            same=tensors,
        )

    def reduce(self, tensors: Tensors, opts: Any) -> dist.Work:
        return self._collective(
            f"reduce to {opts.rootRank}",
            lambda out, _: self._gloo.reduce(out, opts),
            tensors,
            same=tensors,
        )

    def broadcast(self, tensors: Tensors, opts: Any) -> dist.Work:
        is_source = opts.rootRank == self._rank
        return self._collective(
            f"broadcast from {opts.rootRank}",
            lambda out, given: self._gloo.broadcast([*out, *given], opts),
            [] if is_source else tensors,
            tensors if is_source else [],
            same=tensors,
        )

    def allgather(self, outputs: list[Tensors], inputs: Tensors, opts: Any) -> dist.Work:
        return self._collective(
            "all-gather into a list",
            lambda out, given: self._gloo.allgather(out, given, opts),
            outputs,
            inputs,
            same=outputs,
        )

    def all_gather_single_coalesced(self, outs: Tensors, ins: Tensors, opts: Any) -> dist.Work:
        return self._collective(
            "all-gather", self._each(self._gloo._allgather_base, opts), outs, ins
        )

    def all_gather_single(self, out: torch.Tensor, given: torch.Tensor, opts: Any) -> dist.Work:
        return self.all_gather_single_coalesced([out], [given], opts)

    def reduce_scatter(self, outputs: Tensors, inputs: list[Tensors], opts: Any) -> dist.Work:
        if len({piece.numel() for pieces in inputs for piece in pieces}) > 1:
            raise BrokenRule(self._name("reduce-scatter of unequal pieces"))
        return self._collective(
            "reduce-scatter of a list",
            lambda out, given: self._gloo.reduce_scatter(out, given, opts),
            outputs,
            inputs,
        )

    def reduce_scatter_single_coalesced(self, outs: Tensors, ins: Tensors, opts: Any) -> dist.Work:
        run = self._each(self._gloo._reduce_scatter_base, opts)
        return self._collective("reduce-scatter", run, outs, ins)

    def reduce_scatter_single(self, out: torch.Tensor, given: torch.Tensor, opts: Any) -> dist.Work:
        return self.reduce_scatter_single_coalesced([out], [given], opts)

    def all_to_all_single(
        self,
        out: torch.Tensor,
        given: torch.Tensor,
        out_sizes: list[int],
        given_sizes: list[int],
        opts: Any,
    ) -> dist.Work:
        return self._collective(
            "all-to-all",
            lambda outs, ins: self._gloo.alltoall_base(*outs, *ins, out_sizes, given_sizes, opts),
            [out],
            [given],
            same=[],  # unlike sizes are what it is for
        )

    def gather(self, outputs: list[Tensors], inputs: Tensors, opts: Any) -> dist.Work:
        return self._collective(
            f"gather to {opts.rootRank}",
            lambda out, given: self._gloo.gather(out, given, opts),
            outputs,
            inputs,
        )

    def scatter(self, outputs: Tensors, inputs: list[Tensors], opts: Any) -> dist.Work:
        return self._collective(
            f"scatter from {opts.rootRank}",
            lambda out, given: self._gloo.scatter(out, given, opts),
            outputs,
            inputs,
            same=outputs,
        )

    def barrier(self, opts: Any) -> dist.Work:
        work = self.allreduce([torch.zeros(1)], dist.AllreduceOptions())
        work.wait()  # NCCL's blocks the thread as well
        return work

    def _each(self, call: Callable[..., dist.Work], opts: Any) -> Run:
        def run(outs: Tensors, ins: Tensors) -> None:
            for out, given in zip(outs, ins, strict=True):
                call(out, given, opts).wait()

        return run

    def _collective(
        self, kind: str, run: Run, outputs: Any, inputs: Any = (), *, same: Any = None
    ) -> dist.Work:
        """Launch `run` with copies of the tensors; `same` are of one size on all ranks."""
        same = tree_leaves(inputs if same is None else same)
        signature = ", ".join([kind, *(f"{one.numel()} x {one.dtype}" for one in same)])
        name = self._name(signature)
        if same and not any(one.numel() for one in same):
            raise BrokenRule(f"{name}: nothing is sent")
        stream = self._stream("group", range(self._size), name)
        outs, ins = (tree_map(lambda one: one.detach().clone(), some) for some in (outputs, inputs))
        for tensor in tree_leaves(outputs):
            _spoil(tensor)

        def operation() -> None:
            self._compare(signature)
            work = run(outs, ins)
            if work is not None:
                work.wait()

        found = Operation(
            name,
            stream.launch(operation),
            read=list(zip(tree_leaves(inputs), tree_leaves(ins), strict=True)),
            written=list(zip(tree_leaves(outputs), tree_leaves(outs), strict=True)),
        )
        if self._grouped is not None:
            self._grouped.append(found)
        return found

    def _compare(self, signature: str) -> None:
        """That all ranks have come to the same collective."""
        text = signature.encode()[:_SIGNATURE_BYTES].ljust(_SIGNATURE_BYTES)
        mine = torch.tensor(list(text), dtype=torch.uint8)
        found = [torch.empty_like(mine) for _ in range(self._size)]
        self._gloo.allgather([found], [mine]).wait()
        for rank, theirs in enumerate(found):
            if not torch.equal(mine, theirs):
                other = bytes(theirs.tolist()).decode().strip()
                raise BrokenRule(f"{self._name(signature)}: rank {rank} calls {other!r} instead")

    # Of both

    def _stream(self, communicator: str, ranks: Sequence[int], name: str) -> Stream:
        """That of a communicator, which is created together with its other ranks."""
        if communicator not in self._streams:
            keys = [f"communicator of {communicator}: rank {rank}" for rank in ranks]
            self._store.set(keys[ranks.index(self._rank)], "here")
            try:
                self._store.wait(keys, self._timeout)
            except RuntimeError as error:
                raise BrokenRule(
                    f"{name}: creates the communicator of the {communicator}, and not all its "
                    "ranks come to do so"
                ) from error
            self._streams[communicator] = self._make_stream(communicator)
        return self._streams[communicator]

    def _name(self, what: str) -> str:
        return f"rank {self._rank} of group {self.group_name}: {what}"


def _spoil(tensor: torch.Tensor) -> None:
    """So that whoever uses it too early is seen; unseen by autograd, as what NCCL writes."""
    if tensor.is_floating_point():
        tensor.data.fill_(torch.nan)
    elif tensor.dtype is not torch.bool:
        tensor.data.fill_(torch.iinfo(tensor.dtype).max)


def _same_bytes(one: torch.Tensor, other: torch.Tensor) -> bool:
    """Equal, where a number that is not one equals itself."""
    if one.untyped_storage().nbytes() < other.nbytes:
        return False  # its memory was given back
    flat = [tensor.detach().contiguous().reshape(-1).view(torch.uint8) for tensor in (one, other)]
    return torch.equal(*flat)
