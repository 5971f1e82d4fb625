"""How many bytes does one parameter take, and which ranks hold them? Weights, gradients, states."""

from __future__ import annotations

from dataclasses import dataclass

from drystone.describe.recipe import Optimizer, Precision, Recipe, StepKernel
from drystone.estimate.launchers import Launcher

FP32_WEIGHTS = (Precision.FP32, Precision.TF32, Precision.AMP_FP16, Precision.AMP_BF16)
_PURE = (Precision.FP16, Precision.BF16)
# Moments that each optimizer keeps per parameter, in parameter-sized tensors. Adafactor keeps a row
# and a column instead of a matrix (arXiv:1804.04235): under 1 % of it at usual widths. Muon keeps
# one momentum for matrices (arXiv:2502.16982).
_MOMENTS = {
    Optimizer.ADAM: 2.0,
    Optimizer.ADAM_8BIT: 2.0,
    Optimizer.LAMB: 2.0,
    Optimizer.SGD: 0.0,
    Optimizer.SGD_MOMENTUM: 1.0,
    Optimizer.LION: 1.0,
    Optimizer.MUON: 1.0,
    Optimizer.ADAFACTOR: 0.01,
}
# 8-bit states carry one fp32 scale per block of 256 values (arXiv:2110.02861).
_EIGHT_BIT_BYTES = 1 + 4 / 256


@dataclass(frozen=True, slots=True, kw_only=True)
class StateBytes:
    """Bytes per trainable parameter, before any sharding."""

    weights: float  # what lives on: sharded by ZeRO-3
    compute_copy: float  # a 16-bit copy beside wider weights, whole unless layers are gathered
    gradients: float  # sharded from ZeRO-2 on
    master: float  # fp32 copy of 16-bit weights: sharded with the moments from ZeRO-1 on
    moments: float
    step: float  # temporaries of the optimizer step, sharded like the moments


def state_bytes(recipe: Recipe, launcher: Launcher) -> StateBytes:
    """What the precision, the optimizer and the launcher's conventions come to."""
    precision = recipe.precision
    if precision in FP32_WEIGHTS:
        copy = 0.0 if precision in (Precision.FP32, Precision.TF32) else 2.0
        weights, gradients, master, state = 4.0, 4.0, 0.0, 4.0
    elif precision in _PURE:
        copy, weights, gradients, master, state = 0.0, 2.0, 2.0, 0.0, 2.0
    elif launcher.keeps_master:
        fp16 = precision is Precision.FP16_MIXED
        gradients = float(launcher.fp16_gradient_bytes if fp16 else launcher.bf16_gradient_bytes)
        copy, weights, master, state = 0.0, 2.0, 4.0, 4.0
    else:
        copy, weights, gradients, master, state = 2.0, 4.0, 4.0, 0.0, 4.0
    if recipe.optimizer is Optimizer.ADAM_8BIT:
        state = _EIGHT_BIT_BYTES
    step = _step_bytes(recipe, launcher, gradients=gradients, master=master, state=state)
    return StateBytes(
        weights=weights,
        compute_copy=copy,
        gradients=gradients,
        master=master,
        moments=_MOMENTS[recipe.optimizer] * state,
        step=step,
    )


def _step_bytes(
    recipe: Recipe, launcher: Launcher, *, gradients: float, master: float, state: float
) -> float:
    cast = 4.0 if master and gradients < 4 and launcher.casts_gradients_for_step else 0.0
    if recipe.optimizer is Optimizer.ADAM_8BIT:
        return cast  # one kernel, block by block (bitsandbytes)
    if recipe.step_kernel is StepKernel.FOREACH or launcher.step_copies:
        return cast + max(launcher.step_copies, 1.0) * state
    return cast
