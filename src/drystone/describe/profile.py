"""Profiles: what was measured on a real device, as a file, and which GPU types have one.

A profile is a JSON or YAML file that `drystone profile` writes and people may edit. Every part is
optional; what is there wins over the catalogue and over the calibrated shares:

- `matmuls`: timed multiplications; the rate and the ramp of `compute` are fitted to them;
- `memory_bandwidth_bytes_per_second`: what a large copy reaches, read plus written;
- `launch_seconds`: host time to enqueue one small kernel;
- `attention`: timed attention proper, forward and backward;
- `collectives`: timed collectives inside a node, between nodes, or with another GPU type;
- `layers`: timed layers of one model, by micro-batch;
- `paces`: computing of running jobs, measured and estimated, by micro-batch;
- `steps`: whole measured steps; the estimate for that model and launcher is scaled to them;
- `readings`: how far runs here were from their estimates, which corrects like runs (`pooled`).

A profile that was adopted is that of its GPU type in every estimate of this process from then on.
"""

from __future__ import annotations

import json
from collections.abc import Iterable, Sequence
from functools import cache, cached_property
from math import log2
from pathlib import Path
from typing import Any, Final, Literal

import yaml
from pydantic import BaseModel, ConfigDict, Field, ValidationError

from drystone.describe.catalogue import find_gpu
from drystone.describe.kind import Kind
from drystone.describe.machine import MEASURED, Link
from drystone.errors import InvalidSpec, UnknownName, UnreadableFile, reason_of

_MAX_BYTES: Final = 10_000_000


class _Part(BaseModel):
    model_config = ConfigDict(frozen=True, extra="forbid", allow_inf_nan=False)


class TimedMatmul(_Part):
    """One multiplication of m x k by k x n."""

    m: int = Field(gt=0)
    n: int = Field(gt=0)
    k: int = Field(gt=0)
    seconds: float = Field(gt=0)


class TimedAttention(_Part):
    """Causal attention of some sequences, without the projections around it."""

    sequences: int = Field(gt=0)
    heads: int = Field(gt=0)
    tokens: int = Field(gt=0)
    head_dim: int = Field(gt=0)
    forward_seconds: float = Field(gt=0)
    backward_seconds: float = Field(gt=0)

    @property
    def forward_flops(self) -> float:
        """Operations of the half that a causal mask leaves; the backward pass has 2.5 times it."""
        return 2.0 * self.sequences * self.heads * self.tokens**2 * self.head_dim


class TimedCollective(_Part):
    """One collective over `ranks` GPUs; `other` is the type at the other end, where it differs."""

    kind: Literal["all-reduce", "all-gather", "reduce-scatter"] = "all-reduce"
    level: Literal["intra", "inter"] = "intra"
    other: str = ""
    ranks: int = Field(ge=2)
    num_bytes: int = Field(gt=0)
    seconds: float = Field(gt=0)


class TimedStep(_Part):
    """A whole step that was measured, and what the formulas said about it."""

    model: str
    launcher: str
    measured_seconds: float = Field(gt=0)
    estimated_seconds: float = Field(gt=0)


class TimedLayer(_Part):
    """One layer of a model and one micro-batch; `backward_seconds` without recomputation."""

    model: str
    seq_len: int = Field(gt=0)
    micro_batch: int = Field(gt=0)
    forward_seconds: float = Field(gt=0)
    backward_seconds: float = Field(gt=0)


class TimedPace(_Part):
    """Seconds that a rank computed on a micro-batch, and what the formulas said about it."""

    model: str
    launcher: str
    micro_batch: int = Field(gt=0)
    measured_seconds: float = Field(gt=0)
    estimated_seconds: float = Field(gt=0)


class Reading(_Part):
    """How far one run was from its estimate, and what it has in common with others."""

    measure: Literal["memory", "speed"]
    launcher: str = ""
    gpu: str = ""
    family: str = ""
    work: str = ""
    run: str = ""
    ratio: float = Field(gt=0)  # measured over estimated: bytes, or seconds of a step
    source: str = ""

    @property
    def kind(self) -> Kind:
        """Of the run."""
        return Kind(self.launcher, self.gpu, self.family, self.work, self.run)


class Profile(_Part):
    """A measured device. Frozen and hashable, so that estimates can be kept by it."""

    device: str
    source: str = ""
    precision: str = "bf16-mixed"
    matmuls: tuple[TimedMatmul, ...] = ()
    memory_bandwidth_bytes_per_second: float | None = Field(default=None, gt=0)
    launch_seconds: float | None = Field(default=None, gt=0)
    attention: tuple[TimedAttention, ...] = ()
    collectives: tuple[TimedCollective, ...] = ()
    layers: tuple[TimedLayer, ...] = ()
    paces: tuple[TimedPace, ...] = ()
    steps: tuple[TimedStep, ...] = ()
    readings: tuple[Reading, ...] = ()

    @cached_property
    def _digest(self) -> int:
        return hash(tuple(getattr(self, name) for name in type(self).model_fields))

    def __hash__(self) -> int:
        """Of all parts, computed once: caches of estimates ask for it at every call."""
        return self._digest

    def link(self, level: str, other: str = "") -> Link | None:
        """What was measured inside a node, between nodes, or towards nodes of another type."""
        timed = [
            collective
            for collective in self.collectives
            if (collective.level, collective.other) == (level, other)
        ]
        words = {"intra": "inside a node", "inter": "between nodes"}[level]
        return fit_link(timed, name=f"measured {words}") if timed else None

    def slowed(self, speed: float) -> Profile:
        """The same device with `speed` times its pace; links and the host stay as they are."""
        if speed == 1.0:
            return self
        bandwidth = self.memory_bandwidth_bytes_per_second
        return self.model_copy(
            update={
                "matmuls": _slower(self.matmuls, speed),
                "attention": _slower(self.attention, speed),
                "memory_bandwidth_bytes_per_second": bandwidth and bandwidth * speed,
                "layers": _slower(self.layers, speed),
                "steps": (),
            }
        )


def _slower(timed: tuple[Any, ...], speed: float) -> tuple[Any, ...]:
    """The same with every field of seconds longer."""
    return tuple(
        row.model_copy(
            update={
                name: getattr(row, name) / speed
                for name in type(row).model_fields
                if name.endswith("seconds")
            }
        )
        for row in timed
    )


def adopt_profiles(profiles: Iterable[Profile]) -> None:
    """From now on these are the profiles of their GPU types, whoever asks for an estimate."""
    MEASURED.update({find_gpu(profile.device).name: profile for profile in profiles})


def adopt_profile_files(paths: Iterable[Path]) -> None:
    """Read profiles, and adopt them; each must be of a known GPU type."""
    profiles = []
    for path in paths:
        profile = load_profile(path)
        try:
            find_gpu(profile.device)
        except UnknownName as error:
            error.where = f"{path}, device"
            raise
        profiles.append(profile)
    adopt_profiles(profiles)


def forget_profiles() -> None:
    """Estimate by formulas again."""
    MEASURED.clear()


def fit_link(timed: Sequence[TimedCollective], *, name: str) -> Link:
    """Bandwidth from the largest collective, latency from the smallest."""

    def moved(collective: TimedCollective) -> float:
        factor = 2.0 if collective.kind == "all-reduce" else 1.0
        return factor * collective.num_bytes * (1.0 - 1.0 / collective.ranks)

    largest, smallest = max(timed, key=moved), min(timed, key=moved)
    bandwidth = moved(largest) / largest.seconds
    hops = max(1.0, log2(smallest.ranks)) * (2.0 if smallest.kind == "all-reduce" else 1.0)
    latency = max(0.0, smallest.seconds - moved(smallest) / bandwidth) / hops
    return Link(
        name=name, bandwidth_bytes_per_second=bandwidth, latency_seconds=latency, source="profile"
    )


@cache
def profile_at(path: str) -> Profile:
    """The profile that a GPU type names; read once."""
    return load_profile(Path(path))


def load_profile(path: Path) -> Profile:
    """Read a profile; a wrong one is an error that says what and where."""
    try:
        if path.stat().st_size > _MAX_BYTES:
            raise UnreadableFile("is too large for a profile", where=str(path))
        text = path.read_text(encoding="utf-8")
        document: Any = json.loads(text) if path.suffix == ".json" else yaml.safe_load(text)
    except (OSError, UnicodeDecodeError, ValueError, RecursionError, yaml.YAMLError) as error:
        raise UnreadableFile(
            f"cannot be read as a profile: {reason_of(error)}",
            where=str(path),
            hint="Write one with `drystone profile --out FILE`",
        ) from None
    try:
        return Profile.model_validate(document)
    except ValidationError as error:
        first = error.errors()[0]
        place = ".".join(str(part) for part in first["loc"]) or "the file"
        raise InvalidSpec(
            f"{place}: {first['msg']}", where=str(path), hint="See docs/speed.md for the keys"
        ) from None


def save_profile(profile: Profile, path: Path) -> None:
    """Write it as JSON or YAML, by the ending of the name."""
    document = profile.model_dump(mode="json", exclude_none=True)
    if path.suffix == ".json":
        text = json.dumps(document, indent=2) + "\n"
    else:
        text = yaml.safe_dump(document, sort_keys=False)
    path.write_text(text, encoding="utf-8")
