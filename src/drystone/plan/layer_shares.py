"""How many layers does each pipeline stage get, when stages are unlike? The exact bottleneck.

Given the seconds of one layer on each stage, what a stage takes besides, and how many layers its
memory holds, find whole numbers of layers, at least one each, that make the slowest stage as fast
as possible, and among those the least sum. Numbers in, numbers out.
"""

from __future__ import annotations

import numpy as np
import numpy.typing as npt

FloatArray = npt.NDArray[np.float64]
IntArray = npt.NDArray[np.int64]


def share_layers(
    num_layers: int, layer_seconds: FloatArray, other_seconds: FloatArray, most_layers: IntArray
) -> IntArray | None:
    """Layers of each stage, or None where they do not fit.

    The slowest stage takes one of the values `other + n * layer`; a binary search over them finds
    the least for which all layers have a place. O(S L log(S L)).
    """
    most = np.minimum(most_layers, num_layers)
    if (most < 1).any() or most.sum() < num_layers or len(most) > num_layers:
        return None
    counts = np.arange(1, int(most.max()) + 1)
    values = other_seconds[:, None] + counts * layer_seconds[:, None]
    thresholds = np.unique(values[counts <= most[:, None]])
    thresholds = thresholds[thresholds >= float((other_seconds + layer_seconds).max())]
    low, high = 0, len(thresholds) - 1
    while low < high:
        middle = (low + high) // 2
        room = _room(thresholds[middle], layer_seconds, other_seconds, most)
        if room.sum() >= num_layers:
            high = middle
        else:
            low = middle + 1
    return _fill(
        num_layers, layer_seconds, _room(thresholds[low], layer_seconds, other_seconds, most)
    )


def _room(
    threshold: float, layer_seconds: FloatArray, other_seconds: FloatArray, most: IntArray
) -> IntArray:
    """Layers that each stage finishes within the threshold."""
    # A hair above, so that the value the threshold was made from counts.
    within = np.floor((threshold * (1 + 1e-12) - other_seconds) / layer_seconds)
    return np.minimum(most, within.astype(np.int64))


def _fill(num_layers: int, layer_seconds: FloatArray, room: IntArray) -> IntArray:
    """One layer each, and the others where a layer takes least."""
    layers = np.ones(len(room), dtype=np.int64)
    left = num_layers - len(room)
    for stage in np.argsort(layer_seconds, kind="stable"):
        more = min(left, int(room[stage]) - 1)
        layers[stage] += more
        left -= more
    return layers
