"""Which choices of each class are worth considering? The lower-left convex hull of cost and time.

A choice off the hull is never taken at any budget: some choice, or a mix of two neighbours on the
hull, is as fast for less money (boa.md 2.3, steps 1 and 2). In the plane of (cost, time) of one job
the hull runs from the cheapest choice to the fastest; the same choices are the monotone upper
concave hull in the plane of (price, speed), seen from the origin, since (p, s) -> (p/s, 1/s) maps
lines to lines.
"""

from __future__ import annotations

import numpy as np

from drystone.schedule.snapshot import BoolArray, FloatArray, IntArray


def lower_hulls(costs: FloatArray, times: FloatArray) -> IntArray:
    """Choices on the hull of each row, cheapest first, padded with -1: (rows, most vertices).

    Walks all rows at once, from vertex to vertex: the next is where time falls most for the money,
    and of equals the farthest. A choice that is not finite is none; every row needs one that is.
    """
    usable = np.isfinite(costs) & np.isfinite(times)
    vertex = _cheapest(np.where(usable, costs, np.inf), times)
    rows = np.arange(len(costs))
    columns = [vertex]
    while len(rows):
        following = _next_vertices(costs[rows], times[rows], usable[rows], vertex)
        goes_on = following >= 0
        rows, vertex = rows[goes_on], following[goes_on]
        column = np.full(len(costs), -1, dtype=np.int64)
        column[rows] = vertex
        columns.append(column)
    return np.stack(columns[:-1] or columns, axis=1)


def _cheapest(costs: FloatArray, times: FloatArray) -> IntArray:
    """The cheapest choice of each row; of equals the fastest."""
    cheapest = costs == costs.min(axis=1, keepdims=True)
    fastest: IntArray = np.where(cheapest, times, np.inf).argmin(axis=1).astype(np.int64)
    return fastest


def _next_vertices(
    costs: FloatArray, times: FloatArray, usable: BoolArray, vertex: IntArray
) -> IntArray:
    """The vertex after this one in each row; -1 where nothing is faster."""
    here = vertex[:, None]
    with np.errstate(invalid="ignore"):
        more_cost = costs - np.take_along_axis(costs, here, axis=1)
        less_time = np.take_along_axis(times, here, axis=1) - times
    better = usable & (more_cost > 0) & (less_time > 0)
    slopes = np.zeros_like(costs)
    with np.errstate(over="ignore"):
        np.divide(less_time, more_cost, out=slopes, where=better)
    steepest = slopes.max(axis=1, keepdims=True)
    best = np.where(better & (slopes == steepest), times, np.inf).argmin(axis=1)
    return np.where(better.any(axis=1), best, -1).astype(np.int64)
