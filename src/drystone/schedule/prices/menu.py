"""What can each job choose, in one list? Its options one after another, and nothing at all.

Where jobs have unlike numbers of options a table of all of them is half empty. The list has no
gaps: the options of the first job in order, then "nothing", which is worth 0 and takes no GPU,
then those of the second. What belongs to one job is a stretch of it.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Final

import numpy as np

from drystone.schedule.snapshot import FloatArray, IntArray

# For more numbers than this BLAS starts threads, which cost far more than they save here.
_MOST_FOR_BLAS: Final = 4_000


@dataclass(frozen=True, slots=True, kw_only=True, eq=False)
class Menu:
    """All choices of all jobs."""

    row: IntArray  # whose choice it is, ascending
    option: IntArray  # -1: nothing
    starts: IntArray  # by job: where its stretch begins
    values: FloatArray
    counts: FloatArray  # (types, choices)

    def best_at(self, score: FloatArray) -> IntArray:
        """By job: its choice with the highest score; of equals the first."""
        highest = np.maximum.reduceat(score, self.starts)
        found: IntArray = (score == highest.take(self.row)).nonzero()[0]
        if len(found) > len(self.starts):  # somebody has equals: the first is written last
            best = np.empty(len(self.starts), dtype=np.int64)
            best[self.row[found[::-1]]] = found[::-1]
            return best
        return found


def make_menu(values: FloatArray, counts: Sequence[FloatArray]) -> Menu:
    """Of tables (jobs, options): what options are worth, not above 0 for none, and take by type."""
    num_jobs, width = values.shape
    is_there = np.ones((num_jobs, width + 1), dtype=np.bool_)
    np.greater(values, 0.0, out=is_there[:, :-1])
    at = is_there.ravel().nonzero()[0]
    row = at // (width + 1)
    cell = at - row  # in a table of the options; for nothing, beyond the row
    option = cell - row * width
    ends = (option == width).nonzero()[0]
    option[ends] = -1
    starts = np.zeros(num_jobs, dtype=np.int64)
    starts[1:] = ends[:-1] + 1
    taken = np.zeros((len(counts) + 1, len(at)))
    if width:
        for to, table in zip(taken, (values, *counts), strict=True):
            table.take(cell, out=to, mode="clip")
        taken[:, ends] = 0.0
    return Menu(row=row, option=option, starts=starts, values=taken[0], counts=taken[1:])


def weighted_sum(weights: FloatArray, rows: FloatArray) -> FloatArray:
    """The sum of all rows, each times its weight."""
    if rows.shape[1] > _MOST_FOR_BLAS:
        total: FloatArray = np.einsum("k,kc->c", weights, rows)
        return total
    return weights @ rows


def inner_products(rows: FloatArray, others: FloatArray) -> FloatArray:
    """Of every row with every other row."""
    if rows.shape[1] > _MOST_FOR_BLAS:
        products: FloatArray = np.einsum("kc,lc->kl", rows, others)
        return products
    return rows @ others.T
