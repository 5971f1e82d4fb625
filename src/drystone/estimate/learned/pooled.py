"""What do runs that were measured here say about the next one? Corrections, pooled in log space.

Theory of operation. log(measured / estimated) of a run is the sum of deviations and chance: of its
launcher, its GPU type, its family of models, its work (model, sequence, precision, tuning) and the
very run (layout and batch). Each deviation is normal around 0, which is the shipped estimate, with
a spread that published runs show inside one source (`data/pooled.json`, which
`benchmarks/pooled_corrections.py` writes). Given readings, the correction of another run is the
mean of the distribution that is left, and its spread over the one before is what is left of the
stated range: a reading of the same run says nearly all, one of another model on the same GPU a
part, and readings that have nothing in common with a run say nothing about it. A reading far from
what the others and the prior allow counts less: deviations of runs have the tails of Student's t.
"""

from __future__ import annotations

import json
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass
from functools import cache
from math import exp, log
from pathlib import Path
from typing import Final, NamedTuple, Protocol

import numpy as np
import numpy.typing as npt

from drystone.describe.gpu import GpuSpec
from drystone.describe.kind import Kind
from drystone.describe.layout import Layout
from drystone.describe.model import ModelSpec
from drystone.describe.recipe import Recipe, Tuning

FloatArray = npt.NDArray[np.float64]

POOLED_FILE: Final = Path(__file__).parent / "data" / "pooled.json"
_TAIL_FREEDOM: Final = 3.0  # degrees of freedom of Student's t
_REWEIGHTINGS: Final = 8


class Measured(Protocol):
    """A reading: how far a measurement was from its estimate, and of which kind of run."""

    @property
    def kind(self) -> Kind:
        """Of the run."""

    @property
    def ratio(self) -> float:
        """Measured over estimated: bytes, or seconds of a step."""


class Spreads(NamedTuple):
    """Standard deviations of log(measured / estimated), by what they belong to."""

    launcher: float
    gpu: float
    family: float
    work: float
    run: float
    chance: float  # of one reading


@dataclass(frozen=True, slots=True, kw_only=True)
class Correction:
    """What readings say about one kind of run."""

    factor: float = 1.0  # measured over estimated, to be expected
    width_share: float = 1.0  # of the stated range that is left, in log space
    num_readings: int = 0  # that have something in common with it
    parts: Mapping[str, float]  # factors by the fields of Kind; their product is `factor`

    def scaled_range(self, low: float, high: float) -> tuple[float, float]:
        """The factors of a range, moved by what was learned, and narrower."""
        return (
            self.factor * exp(self.width_share * log(low)),
            self.factor * exp(self.width_share * log(high)),
        )


def kind_of(model: ModelSpec, recipe: Recipe, layout: Layout | None, gpu: str) -> Kind:
    """The kind of a run; work is told by numbers, since names of models differ between people."""
    tuning = recipe.tuning.value
    if recipe.tuning is not Tuning.FULL:
        tuning += f" of rank {recipe.lora.rank}"
    shape = f"{model.hidden_size} x {model.num_layers}, vocabulary {model.vocab_size}"
    work = f"{shape}, {recipe.seq_len} tokens, {recipe.precision.value}, {tuning}"
    how = f"{recipe.recompute}, {recipe.optimizer.value}, {layout} of {recipe.global_batch}"
    return Kind(
        launcher=recipe.launcher,
        gpu=gpu,
        family=model.family,
        work=work,
        run=f"{work}; {how}" if layout is not None else "",
    )


def type_name(gpu: GpuSpec) -> str:
    """The name under which readings on a GPU type are kept: a type like another shares its own."""
    return gpu.like or gpu.name


@cache
def shipped_spreads(measure: str) -> Spreads:
    """The spreads of memory or speed that published runs show."""
    return Spreads(**json.loads(POOLED_FILE.read_text(encoding="utf-8"))[measure])


def correct(readings: Iterable[Measured], kind: Kind, spreads: Spreads) -> Correction:
    """What the readings say about a run of this kind."""
    given = tuple(readings)
    if not given:
        return Correction(parts={})
    kinds = [reading.kind for reading in given]
    logs = np.array([log(reading.ratio) for reading in given])
    variances = np.square(spreads[:-2])
    shared = _equal([kind], kinds)[0] * np.append(variances, 0.0)  # (readings, levels)
    common = _equal(kinds, kinds)
    between = common[..., :-1] @ variances
    tails = _tail_weights(between, common[..., -1], logs, spreads)
    own = spreads.run**2 / np.sqrt(np.outer(tails, tails))
    covariance = between + common[..., -1] * own + np.eye(len(logs)) * spreads.chance**2
    is_same_run = [float(kind.run == other.run and bool(kind.run)) for other in kinds]
    shared[:, -1] = np.array(is_same_run) * spreads.run**2 / tails
    moved = np.linalg.solve(covariance, logs) @ shared
    covered = shared.sum(axis=1)
    prior = float(np.square(spreads[:-1]).sum())
    left = max(prior - float(covered @ np.linalg.solve(covariance, covered)), 0.0)
    chance = spreads.chance**2
    return Correction(
        factor=exp(float(moved.sum())),
        width_share=min(1.0, float(np.sqrt((left + chance) / (prior + chance)))),
        num_readings=int((covered > 0).sum()),
        parts={level: exp(float(part)) for level, part in zip(Kind._fields, moved, strict=True)},
    )


def _tail_weights(
    between: FloatArray, same_run: FloatArray, logs: FloatArray, spreads: Spreads
) -> FloatArray:
    """How much each reading counts: little where its run lies far from all that is known."""
    own = spreads.run**2
    chance = np.eye(len(logs)) * spreads.chance**2
    scale = own + spreads.chance**2
    tails = np.ones(len(logs))
    for _ in range(_REWEIGHTINGS):
        covariance = between + same_run * own / np.sqrt(np.outer(tails, tails)) + chance
        explained = between @ np.linalg.solve(covariance, logs)
        unsure = np.diag(between - between @ np.linalg.solve(covariance, between))
        far = (np.square(logs - explained) + np.maximum(unsure, 0.0)) / scale
        tails = (_TAIL_FREEDOM + 1.0) / (_TAIL_FREEDOM + far)
    return tails


def _equal(kinds: Sequence[Kind], others: Sequence[Kind]) -> FloatArray:
    """1 where two runs share a level; what has no name shares nothing but itself."""
    mine, theirs = np.array(kinds), np.array(others)
    equal = (mine[:, None, :] == theirs[None, :, :]) & (mine != "")[:, None, :]
    if kinds is others:
        equal |= np.eye(len(kinds), dtype=bool)[:, :, None]
    return np.asarray(equal, dtype=np.float64)
