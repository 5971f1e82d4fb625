"""What was measured on a real device, and how does it replace the formulas?

A profile is a JSON or YAML file that `drystone profile` writes and people may edit. Every part is
optional; what is there wins over the catalogue and over the calibrated shares:

- `matmuls`: timed multiplications; the rate and the ramp of `compute` are fitted to them;
- `memory_bandwidth_bytes_per_second`: what a large copy reaches, read plus written;
- `launch_seconds`: host time to enqueue one small kernel;
- `collectives`: timed collectives inside a node or between nodes; bandwidth and latency are fitted;
- `steps`: whole measured steps; the estimate for that model and launcher is scaled to them;
- `readings`: how far runs here were from their estimates, which corrects like runs (`pooled`).
"""

from __future__ import annotations

import json
from dataclasses import dataclass, replace
from functools import cache, cached_property, lru_cache
from pathlib import Path
from typing import TYPE_CHECKING, Any, Literal

import numpy as np
import yaml
from pydantic import BaseModel, ConfigDict, Field, ValidationError

from drystone.describe.machine import Link, Machine
from drystone.errors import InvalidSpec, UnreadableFile, reason_of
from drystone.estimate.learned.pooled import Correction, Kind, correct, shipped_spreads

if TYPE_CHECKING:
    from drystone.estimate.launchers import LauncherEfficiency
    from drystone.estimate.time.compute import Device

# Kernels that the forward pass of an eager layer enqueues: to go from one kernel to one layer.
KERNELS_PER_LAYER = 40
_MAX_BYTES = 10_000_000


class _Part(BaseModel):
    model_config = ConfigDict(frozen=True, extra="forbid", allow_inf_nan=False)


class TimedMatmul(_Part):
    """One multiplication of m x k by k x n."""

    m: int = Field(gt=0)
    n: int = Field(gt=0)
    k: int = Field(gt=0)
    seconds: float = Field(gt=0)


class TimedCollective(_Part):
    """One collective over `ranks` GPUs."""

    kind: Literal["all-reduce", "all-gather", "reduce-scatter"] = "all-reduce"
    level: Literal["intra", "inter"] = "intra"
    ranks: int = Field(ge=2)
    num_bytes: int = Field(gt=0)
    seconds: float = Field(gt=0)


class TimedStep(_Part):
    """A whole step that was measured, and what the formulas said about it."""

    model: str
    launcher: str
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
    collectives: tuple[TimedCollective, ...] = ()
    steps: tuple[TimedStep, ...] = ()
    readings: tuple[Reading, ...] = ()

    @property
    def has_device(self) -> bool:
        """Whether anything about the device itself was measured."""
        return bool(self.matmuls) or self.memory_bandwidth_bytes_per_second is not None

    @cached_property
    def matmul_fit(self) -> MatmulFit | None:
        """Rate and ramp that explain the timed multiplications best."""
        return fit_matmuls(self.matmuls) if self.matmuls else None

    def measured_device(self, device: Device) -> Device:
        """The device with what was measured put in."""
        fit = self.matmul_fit
        if fit is not None:
            attention = fit.flops / device.matmul_flops
            device = replace(
                device,
                matmul_flops=fit.flops,
                head_flops=min(device.head_flops * attention, fit.flops),
                wave_area=fit.wave_area,
                ramp_depth=fit.ramp_depth,
                attention_forward_flops=min(device.attention_forward_flops * attention, fit.flops),
                attention_backward_flops=min(
                    device.attention_backward_flops * attention, fit.flops
                ),
                peak_flops=max(device.peak_flops, fit.flops),
                sustained_share=1.0,
            )
        if self.memory_bandwidth_bytes_per_second is not None:
            device = replace(
                device, bandwidth_bytes_per_second=self.memory_bandwidth_bytes_per_second
            )
        return device

    def apply(
        self, machine: Machine, launcher: LauncherEfficiency
    ) -> tuple[Machine, LauncherEfficiency]:
        """The machine and launcher with measured links and launch time."""
        intra = tuple(collective for collective in self.collectives if collective.level == "intra")
        inter = tuple(collective for collective in self.collectives if collective.level == "inter")
        if intra:
            machine = replace(machine, intra=fit_link(intra, name="measured inside a node"))
        if inter:
            machine = replace(machine, inter=fit_link(inter, name="measured between nodes"))
        if self.launch_seconds is not None:
            launcher = replace(launcher, layer_host_seconds=self.launch_seconds * KERNELS_PER_LAYER)
        return machine, launcher

    def step_factor(self, model: str, launcher: str) -> float:
        """Measured over estimated time of whole steps of this model; 1 when there are none."""
        ratios = [
            step.measured_seconds / step.estimated_seconds
            for step in self.steps
            if step.model == model and step.launcher == launcher
        ]
        return float(np.exp(np.mean(np.log(ratios)))) if ratios else 1.0


@lru_cache(maxsize=1024)
def correction_of(profile: Profile, measure: str, kind: Kind) -> Correction:
    """What the readings of a profile say about a run."""
    mine = [reading for reading in profile.readings if reading.measure == measure]
    return correct(mine, kind, shipped_spreads(measure))


def slowed(device: Device, machine: Machine, factor: float) -> tuple[Device, Machine]:
    """The same as if everything took so many times as long."""

    def link(one: Link) -> Link:
        return replace(
            one,
            bandwidth_bytes_per_second=one.bandwidth_bytes_per_second / factor,
            latency_seconds=one.latency_seconds * factor,
        )

    device = replace(
        device,
        matmul_flops=device.matmul_flops / factor,
        head_flops=device.head_flops / factor,
        attention_forward_flops=device.attention_forward_flops / factor,
        attention_backward_flops=device.attention_backward_flops / factor,
        bandwidth_bytes_per_second=device.bandwidth_bytes_per_second / factor,
    )
    return device, replace(machine, intra=link(machine.intra), inter=link(machine.inter))


@dataclass(frozen=True, slots=True)
class MatmulFit:
    """The three numbers of `compute`'s 2 (A + A0) (D + D0) / rate."""

    flops: float
    wave_area: float
    ramp_depth: float


def fit_matmuls(timed: tuple[TimedMatmul, ...]) -> MatmulFit:
    """Search A0 and D0 on a grid; the rate then follows as the median. Robust to a few outliers."""
    area = np.array([float(step.m) * step.n for step in timed])
    depth = np.array([float(step.k) for step in timed])
    seconds = np.array([step.seconds for step in timed])
    fits = []
    for wave_area in (0.0, *np.geomspace(1e2, 2e7, 22)):
        for ramp_depth in (0.0, *np.geomspace(8, 1024, 15)):
            rates = 2.0 * (area + wave_area) * (depth + ramp_depth) / seconds
            rate = float(np.median(rates))
            fits.append((float(np.abs(np.log(rates / rate)).mean()), rate, wave_area, ramp_depth))
    _, rate, wave_area, ramp_depth = min(fits)
    return MatmulFit(flops=rate, wave_area=float(wave_area), ramp_depth=float(ramp_depth))


def fit_link(timed: tuple[TimedCollective, ...], *, name: str) -> Link:
    """Bandwidth from the largest collective, latency from the smallest."""

    def moved(one: TimedCollective) -> float:
        factor = 2.0 if one.kind == "all-reduce" else 1.0
        return factor * one.num_bytes * (1.0 - 1.0 / one.ranks)

    largest, smallest = max(timed, key=moved), min(timed, key=moved)
    bandwidth = moved(largest) / largest.seconds
    hops = max(1.0, float(np.log2(smallest.ranks))) * (
        2.0 if smallest.kind == "all-reduce" else 1.0
    )
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
