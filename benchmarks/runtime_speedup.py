"""What does an uneven split gain on devices of unlike speed? Emulated, on CPU.

    python benchmarks/runtime_speedup.py [--speeds 1 3] [--batches 4 12] [--repeats 3]
    python benchmarks/runtime_speedup.py --replay [--wire-share 0.05]

Compares, in one run and interleaved: our engine with even batches, with the given batches, and
FSDP2 with accumulation and even batches. All are paced alike (`emulate.py`): a block's forward
pass, its backward pass with recomputation and the head cost a fixed time a sample on the fastest
device. With compute alone, the even split is slower than the uneven one by (sum of speeds) / (ranks
x slowest).

With `--replay` nothing is paced: recorded logs are replayed (`runtime_replay.py`), for speeds 1 : 3
and 1 : 1 : 2 : 4.
"""

from __future__ import annotations

import argparse
import os
import statistics
import tempfile
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any

import torch
import torch.distributed as dist
import torch.multiprocessing as mp
from torch import nn
from torch.distributed.device_mesh import init_device_mesh
from torch.distributed.fsdp import FSDPModule, fully_shard
from torch.utils.checkpoint import checkpoint

from drystone.describe.model import Attention, Block, Mlp, ModelSpec, Norm
from drystone.run.train.data import RankWork, SyntheticTokens, micro_batches
from drystone.run.train.emulate import Pacer
from drystone.run.train.models.transformer import build_model
from drystone.run.train.uneven.engine import Engine
from figures import print_figures
from runtime_replay import Recorder, record_fsdp, replayed_seconds

FORWARD, BACKWARD, HEAD = 0.016, 0.048, 0.016  # seconds a sample, on the fastest
SECONDS = {"forward": FORWARD, "backward": BACKWARD, "head": HEAD}
SEQ_LEN, VOCAB, WIDTH, NUM_LAYERS = 16, 128, 256, 6

Timed = Callable[[], None]


def a_spec() -> ModelSpec:
    """Short samples, so that the real work is a small part of the emulated one."""
    block = Block(
        attention=Attention(num_heads=2, num_kv_heads=2, head_dim=WIDTH // 2),
        feed_forward=Mlp(ffn_size=4 * WIDTH, gated=False),
        norm=Norm.LAYER,
    )
    return ModelSpec(
        name="paced", hidden_size=WIDTH, stack=((block, NUM_LAYERS),), vocab_size=VOCAB,
        learned_positions=SEQ_LEN, final_norm=Norm.LAYER,
    )  # fmt: skip


def make_engine_step(batches: list[int], pacer: Pacer) -> Timed:
    """A step of ours: micro-batches of one sample, even state."""
    works = [RankWork(batch=batch, micro_batch=1) for batch in batches]
    engine = Engine(build_model(a_spec()), [1.0] * len(works), pacer=pacer)
    source = SyntheticTokens(seq_len=SEQ_LEN, vocab_size=VOCAB)
    runs = micro_batches(works, engine.wire.rank, 0)
    samples = [source.read(run) for run in runs]

    def step() -> None:
        engine.compute_gradients(samples)

    return step


class Begin(torch.autograd.Function):
    """Passes through; in the backward pass it marks when a block's begins."""

    @staticmethod
    def forward(ctx: Any, x: torch.Tensor, marks: list[float]) -> torch.Tensor:
        """Unchanged."""
        ctx.marks = marks
        return x.clone()

    @staticmethod
    def backward(ctx: Any, gradient: torch.Tensor) -> tuple[torch.Tensor, None]:
        """The clock starts."""
        ctx.marks.append(time.perf_counter())
        return gradient, None


class End(torch.autograd.Function):
    """Passes through; in the backward pass it waits until a device of that speed had been done."""

    @staticmethod
    def forward(ctx: Any, x: torch.Tensor, marks: list[float], pacer: Pacer) -> torch.Tensor:
        """Unchanged."""
        ctx.marks, ctx.pacer = marks, pacer
        return x.clone()

    @staticmethod
    def backward(ctx: Any, gradient: torch.Tensor) -> tuple[torch.Tensor, None, None]:
        """The recomputation has waited for its part; this is the rest."""
        ctx.pacer.wait_until_done("backward_only", len(gradient), started=ctx.marks.pop())
        return gradient, None, None


class PacedBlock(nn.Module):
    """A block with recomputation, as slow as the emulated device."""

    def __init__(self, block: nn.Module, pacer: Pacer | Recorder) -> None:
        super().__init__()
        self.block, self.pacer = block, pacer
        self.marks: list[float] = []

    def forward(self, x: torch.Tensor, rotary: None) -> torch.Tensor:
        """As the block; forward and recomputation are paced inside, the rest around."""

        def compute(x: torch.Tensor) -> torch.Tensor:
            with self.pacer.section("forward", len(x)):
                return self.block(x, rotary)

        x = End.apply(x, self.marks, self.pacer)
        x = checkpoint(compute, x, use_reentrant=False, early_stop=False)
        return Begin.apply(x, self.marks)


def make_fsdp_step(batch: int, pacer: Pacer | Recorder) -> tuple[Timed, Timed]:
    """A step of FSDP2 with accumulation: gradients reduced once, micro-batches of one sample.

    And gathering a block once, as it does in such a step, its copies included.
    """
    model = build_model(a_spec())
    mesh = init_device_mesh("cpu", (dist.get_world_size(),))
    for index, block in enumerate(model.blocks):
        model.blocks[index] = PacedBlock(block, pacer)
        fully_shard(model.blocks[index], mesh=mesh)
    head = model.loss_sum

    def paced_head(hidden: torch.Tensor, batch: torch.Tensor) -> torch.Tensor:
        with pacer.section("head", len(hidden)):
            return head(hidden, batch)

    model.loss_sum = paced_head
    fully_shard(model, mesh=mesh)
    for module in model.modules():
        if isinstance(module, FSDPModule):
            module.set_force_sum_reduction_for_comms(True)
    source = SyntheticTokens(seq_len=SEQ_LEN, vocab_size=VOCAB)
    samples = [source.read([one]) for one in range(batch)]

    def step() -> None:
        for index, sample in enumerate(samples):
            model.set_requires_gradient_sync(index == len(samples) - 1)
            model(sample).backward()
        model.zero_grad()

    def gather() -> None:
        model.blocks[1].unshard()
        model.blocks[1].reshard()

    return step, gather


def measure(
    rank: int,
    folder: str,
    speeds: list[float],
    batches: list[int],
    repeats: int,
    slowdown: float,
) -> None:
    """One rank: the three ways, interleaved; the first writes the seconds."""
    torch.set_num_threads(1)
    dist.init_process_group(
        "gloo", init_method=f"file://{folder}/store", rank=rank, world_size=len(speeds)
    )
    seconds_of = {**SECONDS, "backward_only": BACKWARD - FORWARD}
    pacer = Pacer(speed=speeds[rank] / max(speeds) / slowdown, seconds=seconds_of)
    even = sum(batches) // len(batches)
    steps = {
        "even": make_engine_step([even] * len(batches), pacer),
        "uneven": make_engine_step(batches, pacer),
        "FSDP2, even": make_fsdp_step(even, pacer)[0],
    }
    seconds: dict[str, list[float]] = {name: [] for name in steps}
    for _ in range(repeats):
        for name, step in steps.items():
            dist.barrier()
            started = time.perf_counter()
            step()
            dist.barrier()
            seconds[name].append(time.perf_counter() - started)
    overran = torch.tensor([float(pacer.overruns), float(pacer.num_sections)])
    dist.all_reduce(overran)
    if rank == 0:
        torch.save((seconds, float(overran[0] / overran[1])), Path(folder) / "seconds.pt")
    dist.barrier()
    dist.destroy_process_group()


def compare(
    speeds: list[float], batches: list[int], repeats: int, slowdown: float = 1.0
) -> tuple[dict[str, list[float]], float]:
    """Seconds of every step by way, and the part of sections that took longer than emulated."""
    os.environ["OMP_NUM_THREADS"] = "1"
    with tempfile.TemporaryDirectory() as folder:
        mp.spawn(measure, args=(folder, speeds, batches, repeats, slowdown), nprocs=len(speeds))
        found: tuple[dict[str, list[float]], float] = torch.load(Path(folder) / "seconds.pt")
        return found


def print_replayed(wire_shares: list[float]) -> None:
    """By replay: what uneven batches gain over even ones, ours and FSDP2's."""
    seconds_of = {**SECONDS, "backward_only": BACKWARD - FORWARD}
    gains: dict[str, list[float]] = {}
    print("the first two rows of each: FSDP2's own gather of a block, the shortest and the median")
    print("speeds          batches         wire   even / uneven  FSDP2 even / uneven")
    for speeds, batches in (([1, 3], [4, 12]), ([1, 1, 2, 4], [2, 2, 4, 8])):
        batch = sum(batches) // len(batches)
        log, gather_seconds = record_fsdp(len(speeds), batch, make_fsdp_step)
        shares = dict(zip(("shortest", "median"), gather_seconds, strict=True))
        shares = {name: one / (FORWARD + BACKWARD) for name, one in shares.items()}
        for name, share in (shares | {f"wire_{one:g}": one for one in wire_shares}).items():
            found = replayed_seconds(
                a_spec(), log, seq_len=SEQ_LEN, speeds=speeds, batches=batches,
                sample_seconds=seconds_of, wire_share=share,
            )  # fmt: skip
            even, fsdp = (found[way] / found["uneven"] for way in ("even", "FSDP2, even"))
            print(f"{speeds!s:<15} {batches!s:<15} {share:.3f} {even:>14.3f} {fsdp:>20.3f}")
            gains.setdefault("even", []).append(even)
            gains.setdefault(f"fsdp2_{name}", []).append(fsdp)
    print_figures({f"{name}_of_uneven": min(some) for name, some in gains.items()})


def main() -> None:
    """Measure and print."""
    parser = argparse.ArgumentParser()
    parser.add_argument("--speeds", type=float, nargs="+", default=[1, 3])
    parser.add_argument("--batches", type=int, nargs="+", default=[4, 12])
    parser.add_argument("--repeats", type=int, default=3)
    parser.add_argument("--slowdown", type=float, default=1.0, help="of all devices alike")
    parser.add_argument("--replay", action="store_true", help="recorded logs, exactly")
    parser.add_argument("--wire-share", type=float, nargs="+", default=[0.0, 0.05, 0.1])
    given = parser.parse_args()
    if given.replay:
        print_replayed(given.wire_share)
        return
    seconds, overran = compare(given.speeds, given.batches, given.repeats, given.slowdown)
    limit = sum(given.speeds) / len(given.speeds) / min(given.speeds)
    ours = statistics.median(seconds["uneven"])
    print(f"speeds {given.speeds}, batches {given.batches}: limit {limit:.2f}, "
          f"{overran:.1%} of sections overran")  # fmt: skip
    for name, some in seconds.items():
        median = statistics.median(some)
        print(f"{name:<12} {median:7.3f} s   {median / ours:5.2f} of uneven")
    gained = {name: statistics.median(some) / ours for name, some in seconds.items()}
    print_figures(
        {
            "even_of_uneven": gained["even"],
            "fsdp2_of_uneven": gained["FSDP2, even"],
            "limit": limit,
            "overran": overran,
        }
    )


if __name__ == "__main__":
    main()
