"""How fast do the models of a trace run? Measured seconds a step, by model, batch and GPUs.

A CSV with the columns model, global_batch, gpu_type, num_gpus, num_nodes, iter_time_s. A time that
is not above 0 says that the run was tried and failed.
"""

from __future__ import annotations

import csv
import io
from collections.abc import Iterable
from dataclasses import dataclass
from pathlib import Path
from typing import Final

from drystone.errors import InvalidSpec, UnreadableFile

_COLUMNS: Final = ("model", "global_batch", "gpu_type", "num_gpus", "num_nodes", "iter_time_s")


@dataclass(frozen=True, slots=True, kw_only=True)
class MeasuredStep:
    """One measured configuration."""

    model: str
    global_batch: int
    gpu: str
    num_gpus: int
    num_nodes: int
    step_seconds: float  # not above 0: it was tried and failed

    @property
    def succeeded(self) -> bool:
        """Whether the run gave a time."""
        return self.step_seconds > 0


def load_speeds(path: Path) -> tuple[MeasuredStep, ...]:
    """The measured steps of a file."""
    try:
        reader = csv.DictReader(io.StringIO(path.read_text(encoding="utf-8-sig")), strict=True)
        rows = list(reader)
    except (OSError, UnicodeDecodeError, csv.Error) as error:
        raise UnreadableFile(f"no speeds can be read: {error}", where=str(path)) from error
    missing = [column for column in _COLUMNS if column not in (reader.fieldnames or [])]
    if missing:
        raise UnreadableFile(f"the column {missing[0]} is missing", where=str(path))
    return tuple(_parse(row, f"{path}: line {line}") for line, row in enumerate(rows, start=2))


def _parse(row: dict[str, str], where: str) -> MeasuredStep:
    try:
        return MeasuredStep(
            model=row["model"],
            global_batch=int(row["global_batch"]),
            gpu=row["gpu_type"],
            num_gpus=int(row["num_gpus"]),
            num_nodes=int(row["num_nodes"]),
            step_seconds=float(row["iter_time_s"]),
        )
    except (ValueError, TypeError) as error:
        raise InvalidSpec(f"a number cannot be read: {error}", where=where) from error


# Arena's models by size, and what it assumes for a size that was not measured: a model one step
# smaller is 1.8 times as fast (`macro_def.py`, PARAM_NUM_SCALE_FACTOR).
ARENA_SIZES: Final = {
    "wide_resnet": ("500M", "1B", "2B", "4B", "6.8B", "13B"),
    "bert": ("760M", "1.3B", "2.6B", "6.7B", "15B", "39B"),
    "moe": ("690M", "1.3B", "2.4B", "10B", "27B", "70B"),
}
ARENA_SIZE_FACTOR: Final = 1.8


def fill_sizes(steps: Iterable[MeasuredStep]) -> tuple[MeasuredStep, ...]:
    """Arena's table with its assumption for unmeasured sizes: the next larger one, scaled.

    Times are rounded to the millisecond by way of rounded speeds, as its simulator does.
    """
    known = {
        (one.model, one.global_batch, one.gpu, one.num_gpus, one.num_nodes): one.step_seconds
        for one in steps
    }
    shapes = sorted({key[1:] for key in known})
    filled = []
    for family, sizes in ARENA_SIZES.items():
        for position, size in enumerate(sizes):
            for shape in shapes:
                step = _arena_step(known, family, sizes[position:], shape)
                batch, gpu, num_gpus, num_nodes = shape
                if step is not None:
                    filled.append(
                        MeasuredStep(
                            model=f"{family}_{size}",
                            global_batch=batch,
                            gpu=gpu,
                            num_gpus=num_gpus,
                            num_nodes=num_nodes,
                            step_seconds=step,
                        )
                    )
    return tuple(filled)


_Shape = tuple[int, str, int, int]  # batch, GPU type, GPUs, nodes


def _arena_step(
    known: dict[tuple[str, int, str, int, int], float],
    family: str,
    sizes: tuple[str, ...],
    shape: _Shape,
) -> float | None:
    """Seconds a step of the first size, from the first of these sizes that was measured."""
    for steps_up, size in enumerate(sizes):
        seconds = known.get((f"{family}_{size}", *shape))
        if seconds is not None:
            if seconds <= 0:
                return None
            speed = round(shape[0] / seconds, 3) * ARENA_SIZE_FACTOR**steps_up
            return round(shape[0] / speed, 3)
    return None
