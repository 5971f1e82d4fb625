"""What does an uneven split gain, by replay of recorded logs? Exact, without noise.

    python benchmarks/runtime_speedup.py --replay [--wire-share 0.05]

Our engine's logs come from the engine (`tests/oracles/fake_ranks.py`), those of FSDP2 from a real
run of it on gloo with the same model: every collective it calls, with its bytes, and every section
of compute between, in the order of rank 0; all ranks have the same. There each collective is waited
for where it is called, as FSDP2 does on a processor. Both have the same wire: gathering a block
takes a given part of the time in which the fastest device computes a sample forward and backward
through it. The part that it really takes is measured in the same run, between barriers: FSDP2's own
gather of a block on gloo with the copies into and out of its buffers, the shortest of some and the
median, which is what processes that share cores see.
"""

from __future__ import annotations

import statistics
import sys
import tempfile
import time
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from functools import cache
from pathlib import Path
from typing import Any

import torch
import torch.distributed as dist
import torch.multiprocessing as mp

from drystone.describe.model import ModelSpec
from drystone.run.train.collectives import Log, Started, Waited, Worked
from drystone.run.train.data import RankWork

sys.path.insert(0, str(Path(__file__).resolve().parents[1] / "tests" / "oracles"))

from fake_ranks import logs_of_step
from replay import Link, replay

Step = Callable[[], None]


class Recorder:
    """Stands where a pacer stands, and notes sections instead of pacing them."""

    def __init__(self) -> None:
        self.log: Log = []
        self._num_started = 0

    @contextmanager
    def section(self, kind: str, num_samples: int) -> Iterator[None]:
        """Of compute."""
        yield
        self.log.append(Worked(kind, num_samples))

    def wait_until_done(self, kind: str, num_samples: int, *, started: float) -> None:
        """The rest of a section."""
        del started
        self.log.append(Worked(kind, num_samples))

    def noted(self, kind: str, call: Callable[..., Any], whole: str, at: int) -> Callable[..., Any]:
        """The collective, in the log; `whole` is the argument that has all of the bytes."""

        def noted_call(*args: Any, **kwargs: Any) -> Any:
            tensor = kwargs[whole] if whole in kwargs else args[at]
            number, self._num_started = self._num_started, self._num_started + 1
            self.log.append(Started(number, kind, tensor.nbytes))
            work = call(*args, **kwargs)
            assert work is None, "FSDP2 was seen to wait for every collective on a processor"
            self.log.append(Waited(number))
            return work

        return noted_call


# Of a batch and a recorder: a step, and gathering a block once.
Make = Callable[[int, Recorder], tuple[Step, Step]]


def _record(rank: int, folder: str, num_ranks: int, batch: int, make: Make) -> None:
    torch.set_num_threads(1)
    dist.init_process_group(
        "gloo", init_method=f"file://{folder}/store", rank=rank, world_size=num_ranks
    )
    recorder = Recorder()
    dist.all_gather_single = recorder.noted("gather", dist.all_gather_single, "output_tensor", 0)
    dist.reduce_scatter_single = recorder.noted("reduce", dist.reduce_scatter_single, "input", 1)
    step, gather = make(batch, recorder)
    step()  # the first one prepares things
    recorder.log.clear()
    step()
    log = list(recorder.log)
    seconds = _gather_seconds(gather)
    if rank == 0:
        torch.save((log, seconds), Path(folder) / "log.pt")
    dist.barrier()
    dist.destroy_process_group()


def _gather_seconds(gather: Step, *, repeats: int = 40) -> tuple[float, float]:
    """Of gathering a block when nobody comes late: the shortest, the median."""
    found = []
    for _ in range(repeats):
        dist.barrier()
        started = time.perf_counter()
        gather()
        found.append(time.perf_counter() - started)
    return min(found), statistics.median(found)


def largest_bytes(log: Log) -> int:
    """Of the collectives in a log: those of a block."""
    return max(one.num_bytes for one in log if isinstance(one, Started))


def record_fsdp(num_ranks: int, batch: int, make: Make) -> tuple[Log, tuple[float, float]]:
    """What rank 0 of FSDP2 computes and calls in a step, with so many samples on each rank.

    And the seconds that it takes to gather a block, at least and in the median.
    """
    with tempfile.TemporaryDirectory() as folder:
        mp.spawn(_record, args=(folder, num_ranks, batch, make), nprocs=num_ranks)
        found: tuple[Log, tuple[float, float]] = torch.load(
            Path(folder) / "log.pt", weights_only=False
        )
        return found


@cache
def _our_logs(spec: ModelSpec, batches: tuple[int, ...], seq_len: int) -> Any:
    """Of our engine; the same whatever the wire."""
    works = [RankWork(batch=one, micro_batch=1) for one in batches]
    return logs_of_step(spec, works, seq_len=seq_len, is_small=True)


def replayed_seconds(
    spec: ModelSpec,
    fsdp_log: Log,
    *,
    seq_len: int,
    speeds: Sequence[float],
    batches: Sequence[int],
    sample_seconds: Mapping[str, float],
    wire_share: float,
) -> dict[str, float]:
    """Of a step, by way. `sample_seconds`: on the fastest device, by kind of section."""
    relative = [speed / max(speeds) for speed in speeds]
    even = [sum(batches) // len(batches)] * len(batches)
    a_sample = sample_seconds["forward"] + sample_seconds["backward"]
    rate = largest_bytes(fsdp_log) / (wire_share * a_sample) if wire_share else float("inf")
    link = Link(bandwidth_bytes_per_second=rate)

    def ours(some: Sequence[int]) -> float:
        logs = _our_logs(spec, tuple(some), seq_len)
        return max(replay(logs, relative, sample_seconds, link))

    return {
        "even": ours(even),
        "uneven": ours(batches),
        "FSDP2, even": max(replay([fsdp_log] * len(speeds), relative, sample_seconds, link)),
    }
