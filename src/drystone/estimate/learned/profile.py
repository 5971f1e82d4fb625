"""How does what was measured on a real device replace the formulas?

Rates and links of a profile stand in the place of the catalogue's and of calibrated shares. Timed
layers of a model, and the pace of ranks that ran it, correct the formulas for that model by a
factor for each direction, which depends on the micro-batch: between measured sizes it is
interpolated, beyond them it stays.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, replace
from functools import lru_cache

import numpy as np
import numpy.typing as npt

from drystone.describe.kind import Kind
from drystone.describe.machine import Link, Machine
from drystone.describe.profile import (
    Profile,
    Reading,
    TimedCollective,
    TimedLayer,
    TimedMatmul,
    TimedPace,
    TimedStep,
    fit_link,
    load_profile,
    save_profile,
)
from drystone.estimate.launchers import LauncherEfficiency
from drystone.estimate.learned.pooled import Correction, correct, shipped_spreads
from drystone.estimate.time.compute import Device

__all__ = [
    "Profile",
    "Reading",
    "TimedCollective",
    "TimedLayer",
    "TimedMatmul",
    "TimedPace",
    "TimedStep",
    "fit_link",
    "load_profile",
    "save_profile",
]

FloatArray = npt.NDArray[np.float64]

# Kernels that the forward pass of an eager layer enqueues: to go from one kernel to one layer.
KERNELS_PER_LAYER = 40


@dataclass(frozen=True, slots=True)
class MatmulFit:
    """The three numbers of `compute`'s 2 (A + A0) (D + D0) / rate."""

    flops: float
    wave_area: float
    ramp_depth: float


@dataclass(frozen=True, slots=True, kw_only=True, eq=False)
class LayerCorrection:
    """Measured over estimated seconds of computing, by micro-batch and direction."""

    micro_batches: FloatArray  # rising
    forward: FloatArray
    backward: FloatArray

    def at(self, micro_batch: FloatArray) -> tuple[FloatArray, FloatArray]:
        """The factors of forward and backward pass."""
        where, known = np.log(np.maximum(micro_batch, 1.0)), np.log(self.micro_batches)
        forward, backward = np.log(self.forward), np.log(self.backward)
        return (
            np.exp(np.interp(where, known, forward)),
            np.exp(np.interp(where, known, backward)),
        )


def measured_device(profile: Profile, device: Device) -> Device:
    """The device with what was measured put in."""
    fit = fit_matmuls(profile.matmuls) if profile.matmuls else None
    if fit is not None:
        attention = fit.flops / device.matmul_flops
        device = replace(
            device,
            matmul_flops=fit.flops,
            head_flops=min(device.head_flops * attention, fit.flops),
            wave_area=fit.wave_area,
            ramp_depth=fit.ramp_depth,
            attention_forward_flops=min(device.attention_forward_flops * attention, fit.flops),
            attention_backward_flops=min(device.attention_backward_flops * attention, fit.flops),
            peak_flops=max(device.peak_flops, fit.flops),
            sustained_share=1.0,
        )
    if profile.attention:
        forward = [timed.forward_flops / timed.forward_seconds for timed in profile.attention]
        back = [2.5 * timed.forward_flops / timed.backward_seconds for timed in profile.attention]
        device = replace(
            device,
            attention_forward_flops=float(np.median(forward)),
            attention_backward_flops=float(np.median(back)),
            cudnn_attention_gain=1.0,  # what was timed is what there is
        )
    if profile.memory_bandwidth_bytes_per_second is not None:
        device = replace(
            device, bandwidth_bytes_per_second=profile.memory_bandwidth_bytes_per_second
        )
    return device


def measured_launcher(profile: Profile, launcher: LauncherEfficiency) -> LauncherEfficiency:
    """The launcher with the measured time of a launch."""
    if profile.launch_seconds is None:
        return launcher
    return replace(launcher, layer_host_seconds=profile.launch_seconds * KERNELS_PER_LAYER)


def step_factor(profile: Profile, model: str, launcher: str) -> float:
    """Measured over estimated time of whole steps of this model; 1 when there are none."""
    ratios = [
        step.measured_seconds / step.estimated_seconds
        for step in profile.steps
        if (step.model, step.launcher) == (model, launcher)
    ]
    return _mean(ratios) if ratios else 1.0


def make_correction(
    timed: Sequence[TimedLayer],
    paces: Sequence[TimedPace],
    estimated: tuple[FloatArray, FloatArray],
) -> LayerCorrection | None:
    """From timed layers and from paces of one model; `estimated` are seconds of those layers."""
    ratios: dict[int, list[tuple[float, float]]] = {}
    for layer, forward, backward in zip(timed, *estimated, strict=True):
        found = (layer.forward_seconds / forward, layer.backward_seconds / backward)
        ratios.setdefault(layer.micro_batch, []).append(found)
    for pace in paces:  # newer than any profile, and of the work itself
        ratio = pace.measured_seconds / pace.estimated_seconds
        ratios[pace.micro_batch] = [(ratio, ratio)]
    if not ratios:
        return None
    sizes = sorted(ratios)
    forward, backward = (
        [_mean([pair[side] for pair in ratios[m]]) for m in sizes] for side in (0, 1)
    )
    return LayerCorrection(
        micro_batches=np.array(sizes, dtype=np.float64),
        forward=np.array(forward),
        backward=np.array(backward),
    )


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


def _mean(ratios: Sequence[float]) -> float:
    return float(np.exp(np.mean(np.log(ratios))))


@lru_cache(maxsize=64)
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
