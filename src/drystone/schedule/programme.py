"""Which option should each job take, exactly? An integer programme over options, with HiGHS.

minimise  sum of cost[job, option] x taken[job, option]
where     each job takes one option at most, and the options taken fit the GPUs of each type.

HiGHS (github:ERGO-Code/HiGHS, MIT) is the optional extra `solver`.
"""

from __future__ import annotations

from typing import Any

import numpy as np

from drystone.errors import DrystoneError, MissingExtra
from drystone.schedule.snapshot import FloatArray, IntArray


def choose_exactly(
    costs: FloatArray, counts: IntArray, capacity: IntArray, *, relative_gap: float = 1e-4
) -> IntArray:
    """The option of each job, -1 for none: of least total cost, within `relative_gap`.

    `costs` is (jobs, options), infinite where there is no such option; `counts` is (jobs, options,
    types). Options that cost 0 or more are never taken: nothing at all costs 0.
    """
    chosen = np.full(len(costs), -1, dtype=np.int64)
    rows, columns = np.nonzero(costs < 0)
    if not len(rows):
        return chosen
    taken = _solve(costs[rows, columns], rows, counts[rows, columns], capacity, relative_gap)
    chosen[rows[taken]] = columns[taken]
    return chosen


def _solve(
    costs: FloatArray, rows: IntArray, counts: IntArray, capacity: IntArray, relative_gap: float
) -> IntArray:
    """Which of the variables are 1: one for each row that a job may choose."""
    try:
        import highspy
    except ImportError as error:
        raise MissingExtra("an integer programme needs HiGHS", "solver") from error
    solver = highspy.Highs()
    solver.setOptionValue("output_flag", False)
    solver.setOptionValue("mip_rel_gap", relative_gap)
    solver.setOptionValue("threads", 1)
    solver.passModel(_programme(highspy, costs, rows, counts, capacity))
    solver.run()
    if solver.getModelStatus() != highspy.HighsModelStatus.kOptimal:
        status = solver.modelStatusToString(solver.getModelStatus())
        raise DrystoneError(f"HiGHS found no answer for {len(costs)} options: {status}")
    taken: IntArray = np.flatnonzero(np.array(solver.getSolution().col_value) > 0.5)
    return taken


def _programme(
    highspy: Any, costs: FloatArray, rows: IntArray, counts: IntArray, capacity: IntArray
) -> Any:
    """The matrix by columns: each takes its job's turn, and GPUs of the types of its option."""
    jobs, job_of = np.unique(rows, return_inverse=True)
    takes = counts > 0
    programme = highspy.HighsLp()
    programme.num_col_, programme.num_row_ = len(costs), len(jobs) + len(capacity)
    programme.col_cost_ = costs
    programme.col_lower_, programme.col_upper_ = np.zeros(len(costs)), np.ones(len(costs))
    programme.row_lower_ = np.full(programme.num_row_, -highspy.kHighsInf)
    programme.row_upper_ = np.concatenate((np.ones(len(jobs)), capacity.astype(np.float64)))
    programme.integrality_ = [highspy.HighsVarType.kInteger] * len(costs)
    starts = np.concatenate(([0], np.cumsum(1 + takes.sum(axis=1))))
    index = np.concatenate(
        (job_of[:, None], np.tile(np.arange(len(capacity)) + len(jobs), (len(costs), 1))), axis=1
    )
    value = np.concatenate((np.ones((len(costs), 1)), counts), axis=1)
    is_entry = np.concatenate((np.ones((len(costs), 1), dtype=bool), takes), axis=1)
    matrix = programme.a_matrix_
    matrix.format_ = highspy.MatrixFormat.kColwise
    matrix.start_, matrix.index_, matrix.value_ = starts, index[is_entry], value[is_entry]
    return programme
