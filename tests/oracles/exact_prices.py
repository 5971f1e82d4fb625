"""Exact prices: the problem of `schedule/prices/shadow_prices.py` as a programme for HiGHS.

Slower by ten to a thousand times, and a dependency (the `solver` extra): a judge of our own prices,
and for whoever wants prices that are exact to the last digit. Its duals are the shadow prices.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any

import numpy as np

from drystone.errors import MissingExtra
from drystone.schedule.prices.shadow_prices import Market, Prices
from drystone.schedule.snapshot import IntArray


@dataclass(frozen=True, slots=True, kw_only=True, eq=False)
class BestChoice:
    """The best choice of options that there is, up to the gap that was asked for."""

    picks: IntArray  # -1: none
    value: float
    bound: float  # no choice is worth more


def value_of(market: Market, picks: IntArray) -> float:
    """What these picks are worth together."""
    rows = np.flatnonzero(picks >= 0)
    return float(market.values[rows, picks[rows]].sum())


def solve_exact_prices(market: Market) -> Prices:
    """The prices at which the dual bound is least."""
    cells = np.nonzero(market.values > 0)
    if len(cells[0]) == 0:
        return Prices(prices=np.zeros(len(market.capacity)), bound=0.0)
    solver = _make_solver(market, cells)
    solver.run()
    duals = -np.array(solver.getSolution().row_dual)[-len(market.capacity) :]
    return Prices(
        prices=np.maximum(duals, 0.0), bound=-float(solver.getInfo().objective_function_value)
    )


def choose_exactly(
    market: Market, *, most_gap: float = 1e-4, most_seconds: float = 60.0
) -> BestChoice:
    """The best choice of options, by an integer programme."""
    cells = np.nonzero(market.values > 0)
    picks = np.full(len(market.values), -1, dtype=np.int64)
    if len(cells[0]) == 0:
        return BestChoice(picks=picks, value=0.0, bound=0.0)
    solver = _make_solver(market, cells, is_integer=True)
    solver.setOptionValue("mip_rel_gap", most_gap)
    solver.setOptionValue("time_limit", most_seconds)
    solver.run()
    taken = np.array(solver.getSolution().col_value) > 0.5
    picks[cells[0][taken]] = cells[1][taken]
    info = solver.getInfo()
    return BestChoice(
        picks=picks,
        value=-float(info.objective_function_value),
        bound=-float(info.mip_dual_bound),
    )


def _make_solver(market: Market, cells: tuple[IntArray, ...], *, is_integer: bool = False) -> Any:
    """One variable an option; one row a job (one option at most), then one row a type."""
    highspy = _import_highspy()
    num_jobs, num_types, num_cells = len(market.values), len(market.capacity), len(cells[0])
    counts = np.stack([one[cells] for one in market.counts], axis=1)
    index = np.concatenate(
        (cells[0][:, None], np.broadcast_to(num_jobs + np.arange(num_types), counts.shape)), axis=1
    )
    value = np.concatenate((np.ones((num_cells, 1)), counts), axis=1)
    is_used = value > 0
    model = highspy.HighsLp()
    model.num_col_, model.num_row_ = num_cells, num_jobs + num_types
    model.col_cost_ = -market.values[cells]
    model.col_lower_, model.col_upper_ = np.zeros(num_cells), np.ones(num_cells)
    model.row_lower_ = np.full(num_jobs + num_types, -np.inf)
    model.row_upper_ = np.concatenate((np.ones(num_jobs), market.capacity))
    model.a_matrix_.format_ = highspy.MatrixFormat.kColwise
    model.a_matrix_.start_ = np.concatenate(([0], np.cumsum(is_used.sum(axis=1))))
    model.a_matrix_.index_, model.a_matrix_.value_ = index[is_used], value[is_used]
    if is_integer:
        model.integrality_ = [highspy.HighsVarType.kInteger] * num_cells
    solver = highspy.Highs()
    solver.setOptionValue("output_flag", False)
    solver.passModel(model)
    return solver


def _import_highspy() -> Any:
    try:
        import highspy
    except ImportError:
        raise MissingExtra("exact prices need HiGHS", "solver") from None
    return highspy
