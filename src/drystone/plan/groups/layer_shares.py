"""How many layers does each pipeline stage get, when stages are unlike? The exact bottleneck.

Given the seconds of one layer on each stage, what a stage takes besides, and how many layers its
memory holds, find whole numbers of layers, at least one each, that make the slowest stage as fast
as possible, and among those the least sum. Numbers in, numbers out, for many pipelines at once: one
row each, and a stage that is not there has room for no layer.
"""

from __future__ import annotations

import numpy as np
import numpy.typing as npt

FloatArray = npt.NDArray[np.float64]
IntArray = npt.NDArray[np.int64]
BoolArray = npt.NDArray[np.bool_]

# Halvings of the interval in which the slowest stage's time lies: a part in 10^9 of it is left.
_HALVINGS = 30
_HAIR = 1e-12


def share_layers(
    num_layers: int,
    layer_seconds: FloatArray,
    other_seconds: FloatArray,
    most_layers: IntArray,
    exists: BoolArray,
) -> tuple[IntArray, BoolArray]:
    """Layers of each stage of each pipeline, (rows, stages), and which rows hold all layers.

    The slowest stage takes one of the values `other + n * layer`; halving an interval around the
    least for which all layers have a place leaves only that one.
    """
    most = np.where(exists, np.minimum(most_layers, num_layers), 0)
    number = exists.sum(axis=1)
    fits = (
        ((most >= 1) | ~exists).all(axis=1)
        & (most.sum(axis=1) >= num_layers)
        & (number <= num_layers)
    )
    layers = np.zeros(most.shape, dtype=np.int64)
    rows = np.flatnonzero(fits)
    if len(rows):
        pace = np.where(exists[rows], layer_seconds[rows], 1.0)
        other = np.where(exists[rows], other_seconds[rows], 0.0)
        room = _least_room(num_layers, pace, other, most[rows], exists[rows])
        layers[rows] = _fill(num_layers, pace, room, exists[rows])
    return layers, fits


def _least_room(
    num_layers: int, pace: FloatArray, other: FloatArray, most: IntArray, exists: BoolArray
) -> IntArray:
    """Layers that each stage finishes within the least time in which all of them have a place."""
    one_each = np.where(exists, pace + other, 0.0).max(axis=1)
    low = one_each
    high = np.where(exists, other + most * pace, 0.0).max(axis=1)
    # Without whole numbers and memory all would end together; with whole numbers a layer later.
    together = (num_layers + (exists * other / pace).sum(axis=1)) / (exists / pace).sum(axis=1)
    later = together + np.where(exists, pace, 0.0).max(axis=1)
    for value in (later, together, one_each):  # the interval is open at its lower end
        tried = np.maximum(value, one_each)
        enough = _room(tried, pace, other, most).sum(axis=1) >= num_layers
        high = np.where(enough, np.minimum(high, tried), high)
        low = np.where(enough, low, np.maximum(low, tried))
    for _ in range(_HALVINGS):
        middle = 0.5 * (low + high)
        enough = _room(middle, pace, other, most).sum(axis=1) >= num_layers
        high = np.where(enough, middle, high)
        low = np.where(enough, low, middle)
    return _room(high, pace, other, most)


def _room(threshold: FloatArray, pace: FloatArray, other: FloatArray, most: IntArray) -> IntArray:
    # A hair above, so that the value the threshold was made from counts.
    within = np.floor((threshold[:, None] * (1 + _HAIR) - other) / pace)
    return np.minimum(most, within.astype(np.int64))


def _fill(num_layers: int, pace: FloatArray, room: IntArray, exists: BoolArray) -> IntArray:
    """One layer each, and the others where a layer takes least."""
    more = room - exists
    order = np.argsort(pace, axis=1, kind="stable")
    sorted_more = np.take_along_axis(more, order, axis=1)
    before = np.cumsum(sorted_more, axis=1) - sorted_more
    left = (num_layers - exists.sum(axis=1))[:, None]
    given = np.clip(left - before, 0, sorted_more)
    layers = np.empty_like(room)
    np.put_along_axis(layers, order, given, axis=1)
    return layers + exists
