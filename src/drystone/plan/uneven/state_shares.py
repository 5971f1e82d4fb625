"""Who holds how much training state: shares as equal as the room on each rank allows."""

from __future__ import annotations

import numpy as np
from numpy.typing import ArrayLike, NDArray

from drystone.errors import NothingFits


def state_shares(
    room_bytes: ArrayLike, *, state_bytes: float, num_ranks: ArrayLike = 1
) -> NDArray[np.float64]:
    """The share of the state that a rank of each group holds, given the room that is left on it.

    Water-filling (Cephalo's `min_params`): the smallest level x with
    `sum(min(x, room)) >= state_bytes`, and the share `min(x, room) / state_bytes`. So the largest
    share is as small, and the smallest as large, as they can be; where even shares fit, they are
    even. `num_ranks` says for how many ranks each entry stands. Raises `NothingFits`.
    """
    room = np.maximum(np.asarray(room_bytes, dtype=np.float64), 0.0)
    counts = np.broadcast_to(np.asarray(num_ranks, dtype=np.int64), room.shape)
    short_bytes = state_bytes - float(room @ counts)
    if short_bytes > 0:
        raise NothingFits(
            f"the training state is {short_bytes:.0f} bytes larger than the room left"
        )
    if state_bytes <= 0:
        return np.full(room.shape, 1.0 / int(counts.sum()))
    level_bytes = fill_level_bytes(room, counts, state_bytes=state_bytes)
    return np.asarray(np.minimum(level_bytes, room) / state_bytes, dtype=np.float64)


def fill_level_bytes(
    room_bytes: NDArray[np.float64], counts: NDArray[np.int64], *, state_bytes: float
) -> float:
    """The smallest x with `sum(counts * min(x, room)) >= state_bytes`, if there is one.

    With the rooms ascending, the level is what is left over the ranks that are not yet full, at the
    first rank that has at least that much room.
    """
    order = np.argsort(room_bytes, kind="stable")
    room, ranks = room_bytes[order], counts[order]
    held_bytes = np.concatenate(([0.0], np.cumsum(room * ranks)[:-1]))
    ranks_left = np.cumsum(ranks[::-1])[::-1]
    levels = (state_bytes - held_bytes) / ranks_left
    enough = np.flatnonzero(levels <= room)
    # None only where rounding hides that the last rank is exactly full.
    return float(levels[enough[0]]) if enough.size else float(room[-1])
