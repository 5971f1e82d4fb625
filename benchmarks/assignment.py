"""How long it takes to divide a batch and a state over unlike GPUs, and how that grows.

Promised: 64 GPUs of 5 kinds and a batch of 512 in 50 ms, 1,024 GPUs of 8 kinds and a batch of 4,096
in 1 s. Memory is tried from loose to very tight (the state leaves just more than the least compute
memory, which forces small micro-batches), with smooth profiles and with rough ones (measured curves
bend and jump). The worst case counts; of three runs the best, since a busy machine only ever adds.
"""

from __future__ import annotations

import sys
import time
from dataclasses import dataclass

import numpy as np

from drystone.plan.uneven.assignment import Assignment, plan_assignment
from drystone.plan.uneven.spec import AssignmentSpec, RankKind, even_or_uneven
from drystone.units import GiB
from figures import print_figures

RUNS = 3
SEEDS = (0, 1, 2)
ROOM_SHARES = {"loose": 1.0, "half": 0.5, "scarce": 0.1, "tight": 0.01, "very tight": 0.0005}


@dataclass(frozen=True)
class Size:
    """A cluster, a batch, and the seconds promised for them, if any."""

    num_ranks: int
    num_kinds: int
    batch: int
    promised_seconds: float | None = None


SIZES = (
    Size(8, 3, 64),
    Size(16, 4, 128),
    Size(64, 5, 512, 0.050),
    Size(128, 5, 1024),
    Size(256, 8, 1024),
    Size(512, 8, 2048),
    Size(1024, 8, 4096, 1.0),
    Size(1024, 8, 16384),
)


def build_spec(size: Size, *, room_share: float, rough: bool, seed: int) -> AssignmentSpec:
    """A made-up cluster whose state leaves `room_share` of the room beyond the least compute."""
    generator = np.random.default_rng(seed)
    sizes = np.arange(min(size.batch, 256) + 1)
    counts = np.diff(np.linspace(0, size.num_ranks, size.num_kinds + 1).astype(int))
    kinds = []
    for num_ranks in counts:
        slope = generator.uniform(0.002, 0.02)
        forward = slope * sizes + generator.uniform(0, 0.003)
        memory = (2.5 + generator.uniform(0.1, 0.5) * sizes) * GiB
        if rough:
            forward = forward * generator.uniform(0.8, 1.25, sizes.size)
            memory = memory * generator.uniform(0.7, 1.4, sizes.size)
        forward[0] = 0
        kinds.append(
            RankKind(
                num_ranks=int(num_ranks),
                forward_seconds=forward,
                backward_seconds=2.1 * forward,
                compute_memory_bytes=memory,
                usable_bytes=float(generator.choice([12, 16, 24, 40, 48, 80])) * 0.9 * GiB,
                further_micro_batch_seconds=0.001,
            )
        )
    least = sum(kind.num_ranks * kind.compute_memory_bytes[1:].min() for kind in kinds)
    if not rough:
        least = sum(kind.num_ranks * kind.compute_memory_bytes[1] for kind in kinds)
    room = sum(kind.num_ranks * kind.usable_bytes for kind in kinds) - least
    state = float(room * (1 - room_share)) if room_share < 1 else room * 0.02
    return AssignmentSpec(
        kinds=tuple(kinds),
        batch=size.batch,
        state_bytes=state,
        regimes=even_or_uneven(
            size.num_ranks, allgather_seconds=0.004, reduce_scatter_seconds=0.008
        ),
    )


def best_seconds(spec: AssignmentSpec) -> tuple[float, bool]:
    """The shortest of several runs, and whether anything fitted."""
    best, fits = float("inf"), False
    for _ in range(RUNS):
        start = time.perf_counter()
        fits = isinstance(plan_assignment(spec), Assignment)
        best = min(best, time.perf_counter() - start)
    return best, fits


def main() -> None:
    """Measure, print, and fail if a promise is broken."""
    broken, figures = [], {}
    print("milliseconds, worst of seeds x smooth and rough profiles" + " " * 8 + "promised")
    print(
        f"{'GPUs':>5} {'kinds':>5} {'batch':>6}  " + "".join(f"{name:>12}" for name in ROOM_SHARES)
    )
    for size in SIZES:
        worst = []
        for share in ROOM_SHARES.values():
            specs = [
                build_spec(size, room_share=share, rough=rough, seed=seed)
                for rough in (False, True)
                for seed in SEEDS
            ]
            worst.append(max(best_seconds(spec)[0] for spec in specs))
        promised = size.promised_seconds
        text = f"{1e3 * promised:>10.0f}" if promised else ""
        row = "".join(f"{1e3 * seconds:>12.1f}" for seconds in worst)
        print(f"{size.num_ranks:>5} {size.num_kinds:>5} {size.batch:>6}  {row}{text}")
        figures[f"gpus_{size.num_ranks}_batch_{size.batch}_seconds"] = max(worst)
        if promised and max(worst) > promised:
            broken.append(f"{size.num_ranks} GPUs take {max(worst):.3f} s, more than {promised} s")
    print_figures(figures)
    if broken:
        sys.exit("; ".join(broken))


if __name__ == "__main__":
    main()
