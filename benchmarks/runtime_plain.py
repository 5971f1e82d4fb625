"""Is a rank as fast as a plain loop, two as fast as DDP, and faster than FSDP2 where layers do?

    python benchmarks/runtime_plain.py [--layers 6] [--width 256] [--repeats 10]

Every way trains the same model with the same AdamW on gloo, a step of each in turn, in one run. One
rank stands against a plain loop, with and without recomputation; two equal ranks against DDP (all
weights whole) and FSDP2 with accumulation (weights gathered layer by layer, gradients reduced once
a step, every block recomputed). A ratio is tokens per second of ours over theirs, from medians; by
the clock, and by the processor's time, which other work on the machine disturbs less.
"""

from __future__ import annotations

import argparse
import os
import statistics
import tempfile
import time
from collections.abc import Callable
from functools import partial
from pathlib import Path
from typing import Any

import torch
import torch.distributed as dist
import torch.multiprocessing as mp
from torch import nn
from torch.nn.parallel import DistributedDataParallel
from torch.utils.checkpoint import checkpoint

from drystone.describe.recipe import Recompute
from drystone.run.train.collectives import Wire
from drystone.run.train.data import SyntheticTokens
from drystone.run.train.models.transformer import build_model
from drystone.run.train.stepping import Stepper
from drystone.run.train.uneven.engine import Engine
from drystone.run.train.uneven.whole import WholeEngine
from figures import print_figures
from runtime_even import SEQ_LEN, VOCAB, a_spec, an_optimizer, make_fsdp, make_ours

Step = Callable[[], float]
Times = dict[str, dict[str, list[tuple[float, float]]]]  # by the clock, of the processor


def samples_of(rank: int, num_micro: int, micro: int) -> list[torch.Tensor]:
    """The micro-batches of one rank."""
    source = SyntheticTokens(seq_len=SEQ_LEN, vocab_size=VOCAB)
    starts = [(rank * num_micro + at) * micro for at in range(num_micro)]
    return [source.read(range(start, start + micro)) for start in starts]


def step_of_engine(engine: Stepper, samples: list[torch.Tensor]) -> Step:
    """Ours."""
    optimizer = an_optimizer(engine.parameter_groups())

    def step() -> float:
        loss = engine.compute_gradients(samples).loss
        optimizer.step()
        optimizer.zero_grad(set_to_none=True)
        return loss

    return step


def step_of_loop(model: nn.Module, samples: list[torch.Tensor]) -> Step:
    """A loop as one would write it; DDP exchanges gradients with the last micro-batch."""
    optimizer = an_optimizer(model.parameters())

    def step() -> float:
        total = 0.0
        for at, sample in enumerate(samples):
            if isinstance(model, DistributedDataParallel):
                model.require_backward_grad_sync = at == len(samples) - 1
            loss = model(sample) / len(samples)
            loss.backward()
            total += loss.item()
        optimizer.step()
        optimizer.zero_grad(set_to_none=True)
        return total

    return step


def with_recomputation(model: Any) -> nn.Module:
    """Every block through torch's own checkpoint."""
    for block in model.blocks:
        block.forward = partial(checkpoint, block.forward, use_reentrant=False)
    return model  # type: ignore[no-any-return]


def whole(spec: Any, wire: Wire, recompute: str, *, is_replicated: bool = True) -> WholeEngine:
    """The engine that keeps all weights."""
    return WholeEngine(
        build_model(spec, on_meta=True),
        [1.0] * wire.num_ranks,
        wire=wire,
        is_replicated=is_replicated,
        recompute=Recompute.parse(recompute),
    )


def pairs_alone(spec: Any, given: argparse.Namespace) -> dict[str, dict[str, Step]]:
    """One rank and plain loops."""
    wire, samples = Wire(), samples_of(0, given.micro_batches, given.micro)
    engines = {"none": whole(spec, wire, "none"), "full": whole(spec, wire, "full")}
    loops = {"none": build_model(spec), "full": with_recomputation(build_model(spec))}
    layered = Engine(build_model(spec, on_meta=True), [1.0], wire=wire)
    return {
        "plain_none": {
            "ours": step_of_engine(engines["none"], samples),
            "theirs": step_of_loop(loops["none"], samples),
        },
        "plain_full": {
            "ours": step_of_engine(engines["full"], samples),
            "layered": step_of_engine(layered, samples),
            "theirs": step_of_loop(loops["full"], samples),
        },
    }


def pairs_together(spec: Any, given: argparse.Namespace) -> dict[str, dict[str, Step]]:
    """Two ranks, DDP and FSDP2."""
    wire = Wire()
    samples = samples_of(wire.rank, given.micro_batches, given.micro)
    found = {
        "ddp": {
            "ours": step_of_engine(whole(spec, wire, "none"), samples),
            "zero1": step_of_engine(whole(spec, wire, "none", is_replicated=False), samples),
            "theirs": step_of_loop(DistributedDataParallel(build_model(spec)), samples),
        }
    }
    for number in (1, 4):
        found[f"fsdp2_{number}"] = {
            "ours": make_ours(spec, number, given.micro),
            "theirs": make_fsdp(spec, number, given.micro),
        }
    return found


def measure(rank: int, folder: str, num_ranks: int, given: argparse.Namespace) -> None:
    """One rank; the first writes the times by comparison and way."""
    torch.set_num_threads(1)
    if num_ranks > 1:
        dist.init_process_group(
            "gloo", init_method=f"file://{folder}/store", rank=rank, world_size=num_ranks
        )
    spec = a_spec(given.layers, given.width)
    pairs = pairs_together(spec, given) if num_ranks > 1 else pairs_alone(spec, given)
    found: Times = {}
    for name, ways in pairs.items():
        found[name] = {way: [] for way in ways}
        for _ in range(given.repeats + 1):
            for way, step in ways.items():
                if num_ranks > 1:
                    dist.barrier()
                started, worked = time.perf_counter(), time.process_time()
                step()
                if num_ranks > 1:
                    dist.barrier()
                now = time.perf_counter() - started, time.process_time() - worked
                found[name][way].append(now)
    if rank == 0:
        torch.save(found, Path(folder) / f"{num_ranks}.pt")
    if num_ranks > 1:
        dist.barrier()
        dist.destroy_process_group()


def main() -> None:
    """Measure and print."""
    parser = argparse.ArgumentParser()
    parser.add_argument("--layers", type=int, default=6)
    parser.add_argument("--width", type=int, default=256)
    parser.add_argument("--micro", type=int, default=4, help="samples of a micro-batch")
    parser.add_argument("--micro-batches", type=int, default=2, help="but against FSDP2: 1 and 4")
    parser.add_argument("--repeats", type=int, default=10)
    parser.add_argument("--ranks", type=int, nargs="+", default=[1, 2])
    given = parser.parse_args()
    os.environ["OMP_NUM_THREADS"] = "1"
    found: Times = {}
    with tempfile.TemporaryDirectory() as folder:
        for num_ranks in given.ranks:
            mp.spawn(measure, args=(folder, num_ranks, given), nprocs=num_ranks)
            found |= torch.load(Path(folder) / f"{num_ranks}.pt", weights_only=False)
    figures: dict[str, float] = {}
    print("against     way      clock s  of theirs  processor s  of theirs")
    for name, ways in found.items():
        clock, work = (
            {
                way: statistics.median(one[at] for one in seconds[1:])
                for way, seconds in ways.items()
            }
            for at in (0, 1)
        )
        for way in ways:
            ratios = clock["theirs"] / clock[way], work["theirs"] / work[way]
            print(f"{name:<11} {way:<8} {clock[way]:>7.4f} {ratios[0]:>10.3f} "
                  f"{work[way]:>12.4f} {ratios[1]:>10.3f}")  # fmt: skip
            if way != "theirs":
                figures[f"{way}_of_{name}"] = ratios[0]
                figures[f"{way}_work_of_{name}"] = ratios[1]
    print_figures(figures)


if __name__ == "__main__":
    main()
