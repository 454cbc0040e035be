"""Linear programs, built row by row and solved by HiGHS."""

from __future__ import annotations

import importlib
from collections.abc import Sequence
from dataclasses import dataclass, field
from typing import Any, Literal

import numpy as np

from ..errors import NotSupportedError, PlanError
from ..trace.step_trace import Floats, Ints

Method = Literal["ipm", "simplex"]
_INFEASIBLE = ("kInfeasible", "kUnboundedOrInfeasible")


@dataclass
class LinearProgram:
    """A linear program to which variables, rows and their nonzeros are added."""

    n_rows: int = 0
    n_variables: int = 0
    _costs: list[Floats] = field(default_factory=list)
    _bounds: list[Floats] = field(default_factory=list)
    _parts: list[tuple[Ints, Ints, float]] = field(default_factory=list)

    def variables(
        self,
        count: int,
        cost: Floats | float = 0.0,
        lower: Floats | float = 0.0,
        upper: Floats | float = np.inf,
    ) -> Ints:
        """Add variables and return their indices."""
        self._costs.append(np.full(count, cost))
        bounds = np.empty((count, 2))
        bounds[:, 0], bounds[:, 1] = lower, upper
        self._bounds.append(bounds)
        self.n_variables += count
        return np.arange(self.n_variables - count, self.n_variables)

    def rows(self, count: int) -> Ints:
        """Add rows and return their indices."""
        self.n_rows += count
        return np.arange(self.n_rows - count, self.n_rows)

    def add(self, row: Ints, variable: Ints, value: float) -> None:
        """Add `value` to the nonzeros at (row, variable), pairwise."""
        self._parts.append((row, variable, value))

    def minimum(
        self,
        *,
        at_most: Floats,
        time_limit_s: float,
        method: Method = "ipm",
    ) -> float:
        """Return the minimum cost with each row at most its right-hand side.

        Args:
            at_most: the upper bound of each row, [rows].
            time_limit_s: per method.
            method: the interior point or the simplex method, whichever is faster for the program.
                None of umem's programs is infeasible; where rounding makes one method report that,
                the other one is tried.

        Raises:
            PlanError: there is no solution within the time limit.
            NotSupportedError: highspy is not installed.
        """
        assert np.isfinite(at_most).all(), "a row has no bound"  # HiGHS would leave it out
        highspy = _highspy()
        problem = self._problem(highspy, at_most)
        other: Method = "simplex" if method == "ipm" else "ipm"
        for solver in (method, other):
            highs = highspy.Highs()
            options = {"output_flag": False, "parallel": "off", "solver": solver}
            for name, value in {**options, "time_limit": time_limit_s}.items():
                highs.setOptionValue(name, value)
            taken = highs.passModel(problem)
            assert taken != highspy.HighsStatus.kError, "HiGHS refuses the program"
            highs.run()
            status = highs.getModelStatus()
            if status.name not in _INFEASIBLE:
                break
        if status.name != "kOptimal":
            raise PlanError(
                f"the linear program of {len(at_most)} rows and {self.n_variables} variables ended "
                f"without a solution: {highs.modelStatusToString(status)} (time_limit_s is "
                f"{time_limit_s:g}); raise the limit if it was reached, or use the closed form of "
                "umem.analysis.bounds"
            )
        return float(highs.getInfo().objective_function_value)

    def _problem(self, highspy: Any, right: Floats) -> Any:
        problem = highspy.HighsLp()
        problem.num_col_, problem.num_row_ = self.n_variables, len(right)
        bounds = np.concatenate(self._bounds)
        problem.col_cost_ = np.concatenate(self._costs)
        problem.col_lower_, problem.col_upper_ = bounds[:, 0].copy(), bounds[:, 1].copy()
        problem.row_lower_ = np.full(len(right), -np.inf)
        problem.row_upper_ = right
        matrix = problem.a_matrix_
        matrix.format_ = highspy.MatrixFormat.kColwise
        matrix.start_, matrix.index_, matrix.value_ = self._columns(len(right))
        return problem

    def _columns(self, rows: int) -> tuple[Ints, Ints, Floats]:
        """Return the nonzeros by column: column starts, rows, values. Equal places are summed."""
        row, column, value = _joined(self._parts)
        place = column * rows + row
        order = np.argsort(place, kind="stable")
        first = np.flatnonzero(np.diff(place[order], prepend=-1))
        column, row = np.divmod(place[order][first], rows)
        start = np.searchsorted(column, np.arange(self.n_variables + 1))
        return start, row, np.add.reduceat(value[order], first)


def _joined(parts: Sequence[tuple[Ints, Ints, float]]) -> tuple[Ints, Ints, Floats]:
    rows = np.concatenate([row for row, _, _ in parts])
    columns = np.concatenate([column for _, column, _ in parts])
    return rows, columns, np.concatenate([np.full(len(row), value) for row, _, value in parts])


def _highspy() -> Any:
    try:
        return importlib.import_module("highspy")
    except ImportError as error:
        raise NotSupportedError(
            "bounds by linear programs need highspy, which is not installed; run "
            "`pip install 'umem[bounds]'` or `pip install highspy`"
        ) from error
