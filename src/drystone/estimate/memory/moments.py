"""The moments of a step at which memory can be at its peak: what comes and goes at each."""

from __future__ import annotations

from typing import NamedTuple

import numpy as np

from drystone.estimate.memory.split import FloatArray, IntArray

NOTHING: FloatArray = np.zeros((1, 1))


class Moment(NamedTuple):
    """What comes and goes, at one moment."""

    gradients: FloatArray
    activations: FloatArray
    logits: FloatArray
    gathered: FloatArray
    step: FloatArray

    @property
    def total(self) -> FloatArray:
        """All of it."""
        total, *others = (part for part in self if part is not NOTHING)
        for part in others:
            total = total + part
        return total


class Moments(NamedTuple):
    """The five moments, in the order of `memory.MOMENTS`."""

    loss: Moment
    backward: Moment
    last: Moment
    step: Moment
    load: Moment

    def at(self, moment: IntArray, stage_index: IntArray) -> Moment:
        """For each layout, the items of its moment on the stage of that index."""
        shape = np.broadcast_shapes(*(item.shape for one in self for item in one))
        columns = np.arange(shape[1])
        picked = []
        for item in zip(*self, strict=True):
            stacked = np.stack([np.broadcast_to(one, shape) for one in item])
            picked.append(stacked[moment, stage_index, columns])
        return Moment(*picked)
