"""On equal devices, is our engine as fast as FSDP2, and does it take as little memory?

    python benchmarks/runtime_even.py [--ranks 2] [--layers 8] [--width 256] [--micro-batches 1 4]

Both train the same model on gloo with equal batches, recomputation of every block and AdamW, in one
run, a step of one and a step of the other in turn. Seconds are medians, of the wall and of the
processor; the peak is that of all tensors on rank 0 (`ledger.py`), counted in a step of its own.
FSDP2 accumulates with gradients reduced once a step, its cheapest way.
"""

from __future__ import annotations

import argparse
import os
import statistics
import tempfile
import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from functools import partial
from pathlib import Path
from typing import Any

import torch
import torch.distributed as dist
import torch.multiprocessing as mp
from torch.distributed.algorithms._checkpoint.checkpoint_wrapper import (
    CheckpointImpl,
    checkpoint_wrapper,
)
from torch.distributed.device_mesh import init_device_mesh
from torch.distributed.fsdp import FSDPModule, fully_shard

from drystone.describe.model import Attention, Block, Mlp, ModelSpec
from drystone.run.train.collectives import Wire
from drystone.run.train.data import RankWork, SyntheticTokens, micro_batches
from drystone.run.train.emulate import Ledger
from drystone.run.train.models.transformer import build_model
from drystone.run.train.uneven.engine import Engine
from figures import print_figures

SEQ_LEN, VOCAB = 128, 2048
Step = Callable[[], None]


def a_spec(num_layers: int, width: int) -> ModelSpec:
    """A small Llama whose work outweighs the interpreter's."""
    block = Block(
        attention=Attention(num_heads=4, num_kv_heads=4, head_dim=width // 4),
        feed_forward=Mlp(ffn_size=3 * width, gated=True, activation="silu"),
    )
    return ModelSpec(
        name="even", hidden_size=width, stack=((block, num_layers),), vocab_size=VOCAB,
        tied_embeddings=False,
    )  # fmt: skip


def an_optimizer(parameters: Any) -> torch.optim.Optimizer:
    """The same for both."""
    return torch.optim.AdamW(parameters, lr=1e-3, fused=True)


def make_ours(spec: ModelSpec, num_micro: int, micro: int) -> Step:
    """A step of the engine with equal shares."""
    wire = Wire()
    works = [RankWork(batch=num_micro * micro, micro_batch=micro) for _ in range(wire.num_ranks)]
    engine = Engine(build_model(spec, on_meta=True), [1.0] * wire.num_ranks, wire=wire)
    optimizer = an_optimizer(engine.parameter_groups())
    source = SyntheticTokens(seq_len=SEQ_LEN, vocab_size=VOCAB)
    samples = [source.read(run) for run in micro_batches(works, wire.rank, 0)]

    def step() -> None:
        engine.compute_gradients(samples)
        optimizer.step()
        optimizer.zero_grad(set_to_none=True)

    return step


def make_fsdp(spec: ModelSpec, num_micro: int, micro: int) -> Step:
    """A step of FSDP2: blocks apart, recomputed, gradients reduced with the last micro-batch."""
    model = build_model(spec)
    mesh = init_device_mesh("cpu", (dist.get_world_size(),))
    for index, block in enumerate(model.blocks):
        wrapped = checkpoint_wrapper(block, checkpoint_impl=CheckpointImpl.NO_REENTRANT)
        model.blocks[index] = fully_shard(wrapped, mesh=mesh)
    fully_shard(model, mesh=mesh)
    for module in model.modules():
        if isinstance(module, FSDPModule):
            module.set_force_sum_reduction_for_comms(True)
    optimizer = an_optimizer(model.parameters())
    source = SyntheticTokens(seq_len=SEQ_LEN, vocab_size=VOCAB)
    works = [RankWork(batch=num_micro * micro, micro_batch=micro)] * dist.get_world_size()
    samples = [source.read(run) for run in micro_batches(works, dist.get_rank(), 0)]

    def step() -> None:
        for index, sample in enumerate(samples):
            model.set_requires_gradient_sync(index == len(samples) - 1)
            (model(sample) / len(samples)).backward()
        optimizer.step()
        optimizer.zero_grad(set_to_none=True)

    return step


@contextmanager
def every_resize_counted(ledger: Ledger) -> Iterator[None]:
    """FSDP2 resizes storages by itself; the ledger must see that too."""
    plain = torch.UntypedStorage.resize_

    def resize(storage: torch.UntypedStorage, size: int) -> Any:
        torch.UntypedStorage.resize_ = plain
        try:
            ledger.resize(storage, size)
        finally:
            torch.UntypedStorage.resize_ = resize
        return storage

    torch.UntypedStorage.resize_ = resize
    try:
        yield
    finally:
        torch.UntypedStorage.resize_ = plain


def peak_bytes(make: Callable[[], Step]) -> int:
    """The most that tensors hold in a second step, everything included."""
    with Ledger() as ledger, every_resize_counted(ledger):
        step = make()
        step()
        ledger.reset_peak()
        step()
        return ledger.peak_bytes


def measure(rank: int, folder: str, num_ranks: int, given: argparse.Namespace) -> None:
    """One rank; the first writes what was found."""
    torch.set_num_threads(1)
    dist.init_process_group(
        "gloo", init_method=f"file://{folder}/store", rank=rank, world_size=num_ranks
    )
    spec, found = a_spec(given.layers, given.width), []
    for num_micro in given.micro_batches:
        makes = {
            "FSDP2": partial(make_fsdp, spec, num_micro, given.micro),
            "ours": partial(make_ours, spec, num_micro, given.micro),
        }
        peaks = {name: peak_bytes(make) for name, make in makes.items()}
        steps = {name: make() for name, make in makes.items()}
        wall: dict[str, list[float]] = {name: [] for name in steps}
        work: dict[str, list[float]] = {name: [] for name in steps}
        for _ in range(given.repeats + 1):
            for name, step in steps.items():
                dist.barrier()
                started, worked = time.perf_counter(), time.process_time()
                step()
                dist.barrier()
                wall[name].append(time.perf_counter() - started)
                work[name].append(time.process_time() - worked)
        found.append((num_micro, peaks, wall, work))
    if rank == 0:
        torch.save(found, Path(folder) / "found.pt")
    dist.barrier()
    dist.destroy_process_group()


def main() -> None:
    """Measure and print."""
    parser = argparse.ArgumentParser()
    parser.add_argument("--ranks", type=int, default=2)
    parser.add_argument("--layers", type=int, default=8)
    parser.add_argument("--width", type=int, default=256)
    parser.add_argument("--micro", type=int, default=2, help="samples of a micro-batch")
    parser.add_argument("--micro-batches", type=int, nargs="+", default=[1, 4])
    parser.add_argument("--repeats", type=int, default=5)
    given = parser.parse_args()
    os.environ["OMP_NUM_THREADS"] = "1"
    with tempfile.TemporaryDirectory() as folder:
        mp.spawn(measure, args=(folder, given.ranks, given), nprocs=given.ranks)
        found = torch.load(Path(folder) / "found.pt", weights_only=False)
    figures: dict[str, float] = {}
    print("micro-batches  way    wall s  of FSDP2  processor s  of FSDP2  peak MiB  of FSDP2")
    for num_micro, peaks, wall, work in found:
        for name in peaks:
            walls, works = (
                {one: statistics.median(some[1:]) for one, some in table.items()}
                for table in (wall, work)
            )
            print(f"{num_micro:>13}  {name:<6} {walls[name]:>6.3f} "
                  f"{walls[name] / walls['FSDP2']:>9.3f} {works[name]:>12.3f} "
                  f"{works[name] / works['FSDP2']:>9.3f} {peaks[name] / 2**20:>9.1f} "
                  f"{peaks[name] / peaks['FSDP2']:>9.3f}")  # fmt: skip
        for what, table in (("wall", walls), ("work", works), ("peak", peaks)):
            figures[f"{what}_of_fsdp2_{num_micro}"] = table["ours"] / table["FSDP2"]
    print_figures(figures)


if __name__ == "__main__":
    main()
