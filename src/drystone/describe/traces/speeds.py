"""Measured speeds of the models of a trace: seconds a step, by model, batch and GPUs.

A CSV with the columns model, global_batch, gpu_type, num_gpus, num_nodes, iter_time_s. A time that
is not above 0 says that the run was tried and failed. A file that gathers several sources (column
`source`) gives those of the trace at hand; an empty num_nodes means as few as the count needs.
"""

from __future__ import annotations

from collections import defaultdict
from collections.abc import Iterable
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Final

from drystone.describe.job import JobSpec
from drystone.describe.traces.rows import Row, parse_rows, read_table
from drystone.errors import UnreadableFile

_COLUMNS: Final = ("model", "global_batch", "gpu_type", "num_gpus", "num_nodes", "iter_time_s")


@dataclass(frozen=True, slots=True, kw_only=True)
class MeasuredStep:
    """One measured configuration."""

    model: str
    global_batch: int
    gpu: str
    num_gpus: int
    num_nodes: int  # 0: as few as the count needs
    step_seconds: float  # not above 0: it was tried and failed

    @property
    def succeeded(self) -> bool:
        """Whether the run gave a time."""
        return self.step_seconds > 0


def load_speeds(path: Path, *, source: str = "") -> tuple[MeasuredStep, ...]:
    """The measured steps of a file; where it has several sources, those that begin like `source`.

    Left out are rows that are no measured step of a whole job (column `kind`), and runs that were
    spread over more nodes than they needed (Gavel's `unconsolidated`).
    """
    rows, columns = read_table(path, "speeds")
    missing = [column for column in _COLUMNS if column not in columns]
    if missing:
        raise UnreadableFile(f"the column {missing[0]} is missing", where=str(path))
    sources = (
        {row.text("source") for row in rows if not row.problem} if "kind" in columns else set()
    )
    mine = {name for name in sources if source and name.startswith(source)}
    if len(sources) > 1 and not mine:
        raise UnreadableFile(
            f"the file has speeds of {', '.join(sorted(sources))}, none of them of this trace",
            where=str(path),
            hint="Give the speeds of one source, or a trace whose column `source` names one",
        )
    # Gavel ships two tables; the one of its simulations is first by name.
    chosen = "gavel-sim" if "gavel-sim" in mine else source
    kept = [row for row in rows if not mine or row.problem or row.text("source").startswith(chosen)]
    return tuple(parse_rows(kept, _parse, where=str(path)))


def _parse(row: Row) -> MeasuredStep | None:
    if row.text("kind") in ("estimated", "stage_forward_time"):
        return None
    if row.text("node_desc") == "unconsolidated":
        return None
    if row.text("kind") and row.text("iter_time_s") in ("", "nan"):  # gathered, never measured
        return None
    return MeasuredStep(
        model=row.text("model"),
        global_batch=row.count("global_batch", 1),
        gpu=row.text("gpu_type"),
        num_gpus=row.count("num_gpus"),
        num_nodes=row.count("num_nodes", 0),
        step_seconds=row.number("iter_time_s"),
    )


def fill_batches(
    steps: Iterable[MeasuredStep], jobs: Iterable[JobSpec], *, at_every_size: bool = False
) -> tuple[tuple[MeasuredStep, ...], int]:
    """Steps also for batches that were not measured, and for how many kinds of work that was.

    On each number of GPUs the measured batch nearest to the wanted one gives the samples a second.
    Work that was measured at all is left as it is, unless `at_every_size`: then numbers of GPUs on
    which just its batch is missing are filled too.
    """
    known = tuple(steps)
    measured = {(row.model, row.global_batch) for row in known}
    wanted = {(job.model, job.global_batch) for job in jobs}
    by_place: dict[tuple[str, str, int, int], list[MeasuredStep]] = defaultdict(list)
    for row in known:
        if row.succeeded:
            by_place[row.model, row.gpu, row.num_gpus, row.num_nodes].append(row)
    filled = []
    for model, batch in sorted(wanted if at_every_size else wanted - measured):
        for place, found in by_place.items():
            if place[0] == model:
                near = min(found, key=lambda row: abs(row.global_batch - batch))
                if near.global_batch != batch:
                    seconds = near.step_seconds * batch / near.global_batch
                    filled.append(replace(near, global_batch=batch, step_seconds=seconds))
    return (*known, *filled), len({(row.model, row.global_batch) for row in filled})


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
        (row.model, row.global_batch, row.gpu, row.num_gpus, row.num_nodes): row.step_seconds
        for row in steps
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
