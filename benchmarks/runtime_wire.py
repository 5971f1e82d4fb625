"""How many bytes does a step send? Layer-major accumulation against FSDP2 with accumulation.

    python benchmarks/runtime_wire.py [--ranks 2] [--micro-batches 4 8] [--layers 12] [--width 128]

Both run on gloo over loopback, fp32, with every block recomputed. Bytes are those that the
processes wrote, by the counters of the system, so they include what gloo itself adds; FSDP2 reduces
gradients with the last micro-batch only, which is its cheapest way. Seconds are medians of
interleaved steps on whatever else the machine does: read their ratio, not their size.
"""

from __future__ import annotations

import argparse
import os
import statistics
import tempfile
import time
from collections.abc import Callable
from pathlib import Path

import torch
import torch.distributed as dist
import torch.multiprocessing as mp
from torch.distributed.algorithms._checkpoint.checkpoint_wrapper import checkpoint_wrapper
from torch.distributed.device_mesh import init_device_mesh
from torch.distributed.fsdp import FSDPModule, fully_shard

from drystone.describe.model import Attention, Block, Mlp, ModelSpec, Norm
from drystone.run.train.models.transformer import build_model
from drystone.run.train.uneven.engine import Engine
from figures import print_figures

SEQ_LEN, VOCAB, REPEATS = 64, 512, 3


def a_spec(num_layers: int, width: int) -> ModelSpec:
    """A GPT of that size, embeddings not shared."""
    block = Block(
        attention=Attention(num_heads=4, num_kv_heads=4, head_dim=width // 4, qkv_bias=True),
        feed_forward=Mlp(ffn_size=4 * width, gated=False, bias=True),
        norm=Norm.LAYER,
    )
    return ModelSpec(
        name="wire", hidden_size=width, stack=((block, num_layers),), vocab_size=VOCAB,
        learned_positions=SEQ_LEN, final_norm=Norm.LAYER,
    )  # fmt: skip


def sent_bytes() -> int:
    """What this process has written so far, sockets included."""
    lines = Path("/proc/self/io").read_text(encoding="utf-8").splitlines()
    return int(dict(line.split(": ") for line in lines)["wchar"])


def make_engine_step(spec: ModelSpec, shares: list[float]) -> Callable[[list[torch.Tensor]], None]:
    """A step of ours, without the optimizer."""
    engine = Engine(build_model(spec), shares)

    def step(batches: list[torch.Tensor]) -> None:
        engine.compute_gradients(batches)

    return step


def make_fsdp_step(spec: ModelSpec) -> Callable[[list[torch.Tensor]], None]:
    """A step of FSDP2, without the optimizer: accumulation, gradients reduced once."""
    model = build_model(spec)
    mesh = init_device_mesh("cpu", (dist.get_world_size(),))
    for index, block in enumerate(model.blocks):
        model.blocks[index] = checkpoint_wrapper(block)
        fully_shard(model.blocks[index], mesh=mesh)
    fully_shard(model, mesh=mesh)
    for module in model.modules():
        if isinstance(module, FSDPModule):
            module.set_force_sum_reduction_for_comms(True)

    def step(batches: list[torch.Tensor]) -> None:
        for index, batch in enumerate(batches):
            model.set_requires_gradient_sync(index == len(batches) - 1)
            model(batch).backward()
        model.zero_grad()

    return step


def measure(
    rank: int,
    num_ranks: int,
    folder: str,
    counts: list[int],
    num_layers: int,
    width: int,
    repeats: int,
) -> None:
    """One rank: the steps, interleaved; the first writes the table."""
    torch.set_num_threads(1)
    dist.init_process_group(
        "gloo", init_method=f"file://{folder}/store", rank=rank, world_size=num_ranks
    )
    spec = a_spec(num_layers, width)
    uneven = [1.0] + [3.0] * (num_ranks - 1)
    steps = {
        "FSDP2, accumulation": make_fsdp_step(spec),
        "layer-major, even": make_engine_step(spec, [1.0] * num_ranks),
        "layer-major, uneven": make_engine_step(spec, uneven),
    }
    table = []
    for count in counts:
        batches = [torch.randint(VOCAB, (1, SEQ_LEN + 1)) for _ in range(count)]
        seconds: dict[str, list[float]] = {name: [] for name in steps}
        sent: dict[str, int] = {}
        for _ in range(repeats + 1):
            for name, step in steps.items():
                dist.barrier()
                before, started = sent_bytes(), time.perf_counter()
                step(batches)
                seconds[name].append(time.perf_counter() - started)
                sent[name] = sent_bytes() - before
        for name in steps:
            total = torch.tensor([float(sent[name])])
            dist.all_reduce(total)
            table.append((count, name, float(total), statistics.median(seconds[name][1:])))
    if rank == 0:
        torch.save(table, Path(folder) / "table.pt")
    dist.barrier()
    dist.destroy_process_group()


def compare(
    num_ranks: int,
    counts: list[int],
    num_layers: int,
    width: int,
    *,
    repeats: int = REPEATS,
    start_method: str = "spawn",
) -> list[tuple[int, str, float, float]]:
    """Rows of (micro-batches, way, bytes of all ranks in a step, seconds of a step)."""
    os.environ["OMP_NUM_THREADS"] = "1"
    with tempfile.TemporaryDirectory() as folder:
        args = (num_ranks, folder, counts, num_layers, width, repeats)
        mp.start_processes(measure, args=args, nprocs=num_ranks, start_method=start_method)
        table: list[tuple[int, str, float, float]] = torch.load(Path(folder) / "table.pt")
        return table


def main() -> None:
    """Measure and print."""
    parser = argparse.ArgumentParser()
    parser.add_argument("--ranks", type=int, default=2)
    parser.add_argument("--micro-batches", type=int, nargs="+", default=[4, 8])
    parser.add_argument("--layers", type=int, default=12)
    parser.add_argument("--width", type=int, default=128)
    given = parser.parse_args()
    rows = compare(given.ranks, given.micro_batches, given.layers, given.width)
    base = {count: (sent, seconds) for count, name, sent, seconds in rows if "FSDP2" in name}
    figures: dict[str, float] = {}
    print(f"{given.ranks} ranks, {given.layers} layers of width {given.width}, gloo, fp32")
    print(f"{'micro-batches':>13}  {'way':<20}{'MB a step':>10}{'of FSDP2':>10}{'seconds':>9}"
          f"{'of FSDP2':>10}")  # fmt: skip
    for count, name, sent, seconds in rows:
        print(f"{count:>13}  {name:<20}{sent / 1e6:>10.1f}{sent / base[count][0]:>10.3f}"
              f"{seconds:>9.3f}{seconds / base[count][1]:>10.2f}")  # fmt: skip
        if name == "layer-major, uneven":
            figures[f"bytes_of_fsdp2_{count}"] = sent / base[count][0]
            figures[f"seconds_of_fsdp2_{count}"] = seconds / base[count][1]
    print_figures(figures)


if __name__ == "__main__":
    main()
