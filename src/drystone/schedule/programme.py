"""Linear and integer programmes, solved by HiGHS. No other file imports the solver.

    minimise  costs . x   where  row_lower <= A x <= row_upper  and  0 <= x <= upper

HiGHS (github:ERGO-Code/HiGHS, MIT) is the optional extra `solver`.
"""

from __future__ import annotations

from dataclasses import dataclass

import numpy as np

from drystone.errors import DrystoneError, MissingExtra
from drystone.schedule.snapshot import FloatArray, IntArray


class Unsolved(DrystoneError):
    """A programme has no solution, or none was found."""


@dataclass(frozen=True, slots=True, kw_only=True, eq=False)
class Programme:
    """Costs by variable, bounds by row, and the entries of the matrix between them."""

    costs: FloatArray
    columns: IntArray  # by entry: its variable, ascending
    rows: IntArray  # by entry: its row
    values: FloatArray  # by entry; 0: there is none
    row_upper: FloatArray
    row_lower: FloatArray | None = None  # None: no bound
    upper: FloatArray | None = None  # by variable; None: 1
    is_integer: bool = False
    relative_gap: float = 1e-4  # of an integer programme: how far from the best it may end
    most_nodes: int = 2**31 - 1  # of its search; beyond, it counts as unsolved


def solve(programme: Programme) -> FloatArray:
    """The values of the variables, of least total cost."""
    try:
        import highspy
    except ImportError as error:
        raise MissingExtra("this policy solves a programme with HiGHS", "solver") from error
    num_columns, num_rows = len(programme.costs), len(programme.row_upper)
    if num_columns == 0:
        return np.zeros(0)
    model = highspy.HighsLp()
    model.num_col_, model.num_row_ = num_columns, num_rows
    model.col_cost_, model.col_lower_ = programme.costs, np.zeros(num_columns)
    upper, lower = programme.upper, programme.row_lower
    model.col_upper_ = np.ones(num_columns) if upper is None else upper
    model.row_lower_ = np.full(num_rows, -highspy.kHighsInf) if lower is None else lower
    model.row_upper_ = programme.row_upper
    if programme.is_integer:
        model.integrality_ = [highspy.HighsVarType.kInteger] * num_columns
    is_entry = programme.values != 0
    per_column = np.bincount(programme.columns[is_entry], minlength=num_columns)
    matrix = model.a_matrix_
    matrix.format_ = highspy.MatrixFormat.kColwise
    matrix.start_ = np.concatenate(([0], np.cumsum(per_column)))
    matrix.index_, matrix.value_ = programme.rows[is_entry], programme.values[is_entry]
    solver = highspy.Highs()
    solver.setOptionValue("output_flag", False)
    solver.setOptionValue("mip_rel_gap", programme.relative_gap)
    solver.setOptionValue("mip_max_nodes", programme.most_nodes)
    solver.setOptionValue("threads", 1)  # the same answer on every machine
    solver.passModel(model)
    solver.run()
    if solver.getModelStatus() != highspy.HighsModelStatus.kOptimal:
        status = solver.modelStatusToString(solver.getModelStatus())
        raise Unsolved(f"HiGHS found no answer for {num_columns} variables: {status}")
    return np.array(solver.getSolution().col_value)


def choose_exactly(
    costs: FloatArray,
    counts: IntArray | FloatArray,
    capacity: IntArray | FloatArray,
    *,
    relative_gap: float = 1e-4,
    most_nodes: int = 2**31 - 1,
) -> IntArray:
    """The option of each job, -1 for none: of least total cost, within `relative_gap`.

    Each job takes one option at most, and the options taken fit the GPUs of each type. `costs` is
    (jobs, options), infinite where there is no such option; `counts` is (jobs, options, types).
    Options that cost 0 or more are never taken: nothing at all costs 0.
    """
    chosen = np.full(len(costs), -1, dtype=np.int64)
    jobs, options = np.nonzero(costs < 0)
    if not len(jobs):
        return chosen
    able, job_row = np.unique(jobs, return_inverse=True)
    type_rows = np.tile(len(able) + np.arange(len(capacity)), (len(jobs), 1))
    rows = np.column_stack((job_row, type_rows))
    values = np.column_stack((np.ones(len(jobs)), counts[jobs, options].astype(np.float64)))
    taken = solve(
        Programme(
            costs=costs[jobs, options],
            columns=np.repeat(np.arange(len(jobs)), rows.shape[1]),
            rows=rows.ravel(),
            values=values.ravel(),
            row_upper=np.concatenate((np.ones(len(able)), capacity.astype(np.float64))),
            is_integer=True,
            relative_gap=relative_gap,
            most_nodes=most_nodes,
        )
    )
    chosen[jobs[taken > 0.5]] = options[taken > 0.5]
    return chosen
