"""Learning-rate schedules: warm-up, then constant, linear, cosine, or stable until a last decay.

A factor depends on the step and on the number of all steps alone, so a job that was resized or
begun again goes on where its schedule was.
"""

from __future__ import annotations

import math

import torch

from drystone.describe.files.amounts import span_steps
from drystone.describe.job import TrainConfig


def learning_rate_factor(config: TrainConfig, step: int, num_steps: int) -> float:
    """The share of the learning rate in the step after `step` steps, of `num_steps` in all."""
    warmup = span_steps(config.warmup, num_steps)
    if step < warmup:
        return (step + 1) / warmup
    begins = warmup
    if config.schedule == "wsd":
        begins = max(warmup, num_steps - span_steps(config.decay, num_steps))
    passed = min(max((step - begins) / max(num_steps - begins, 1), 0.0), 1.0)
    match config.schedule:
        case "linear" | "wsd":
            left = 1.0 - passed
        case "cosine":
            left = (1.0 + math.cos(math.pi * passed)) / 2
        case _:
            return 1.0
    return config.floor + (1.0 - config.floor) * left


def has_schedule(config: TrainConfig) -> bool:
    """Whether the learning rate changes at all; otherwise it is left to whoever set it."""
    return config.schedule != "constant" or config.warmup.rstrip("%").strip("0.") != ""


def set_learning_rate(optimizer: torch.optim.Optimizer, factor: float) -> None:
    """Every group at this share of what it began with."""
    for group in optimizer.param_groups:
        group["lr"] = group.setdefault("initial_lr", group["lr"]) * factor
