"""How right the best Cell is against Arena's measured optima: BERT and MoE on four GPU types.

Promised: a median error of at most 15 %, and at least 90 % of the pairs of (type, count) of a job
in the right order. `--rows` prints every row.
"""

from __future__ import annotations

import sys
from collections.abc import Callable
from pathlib import Path
from statistics import median

sys.path.insert(0, str(Path(__file__).resolve().parents[1] / "tests" / "accuracy"))
from arena import Measured, Predicted, load_rows, median_error, predict, ranked_pairs

from figures import print_figures

GROUPS: tuple[Callable[[Measured], str], ...] = (
    lambda row: row.gpu,
    lambda row: f"{row.num_gpus:2d} GPUs",
    lambda row: row.model,
    lambda row: f"{row.family} on {row.gpu}",
    lambda row: "calibration" if row.is_calibration else "held out",
    lambda row: "all",
)


def main() -> int:
    """Print the tables; 1 if a promise is broken."""
    found = [(row, predict(row)) for row in load_rows()]
    predictions = [one for _, one in found if one is not None]
    if "--rows" in sys.argv[1:]:
        print_rows(predictions)
    print(f"{'rows':16} {'n':>4} {'median':>8} {'bias':>8} {'pairs right':>12}")
    for group in GROUPS:
        print_group(predictions, group)
    without = [row for row, one in found if one is None]
    print(f"\n{len(without)} rows without a plan that fits")
    judged = [right for _, _, right in ranked_pairs(predictions)]
    held_out = [one for one in predictions if not one.row.is_calibration]
    print_figures(
        {
            "median_error": median_error(predictions),
            "held_out_median_error": median_error(held_out),
            "pairs_right": sum(judged) / len(judged),
            "without_plan": len(without),
            "measured_seconds": [one.row.step_seconds for one in predictions],
            "predicted_seconds": [one.step_seconds for one in predictions],
        }
    )
    good = median_error(predictions) <= 0.15 and sum(judged) >= 0.90 * len(judged)
    return 0 if good and not without else 1


def print_group(predictions: list[Predicted], group: Callable[[Measured], str]) -> None:
    """One line a value of `group`; pairs are of that value when both sides are."""
    for name in sorted({group(one.row) for one in predictions}):
        mine = [one for one in predictions if group(one.row) == name]
        judged = [right for _, _, right in ranked_pairs(mine)]
        pairs = f"{sum(judged) / len(judged):7.1%} {len(judged):4d}" if judged else ""
        bias = median(one.error for one in mine)
        print(f"{name:16} {len(mine):4d} {median_error(mine):8.1%} {bias:+8.1%} {pairs:>12}")


def print_rows(predictions: list[Predicted]) -> None:
    """Every row, the worst first."""
    print(f"{'model':10} {'batch':>5} {'GPUs':>8} {'nodes':>5} {'measured':>9} {'best':>7} error")
    for one in sorted(predictions, key=lambda one: -abs(one.error)):
        row = one.row
        gpus = f"{row.num_gpus} {row.gpu}"
        print(
            f"{row.model:10} {row.global_batch:5d} {gpus:>8} {row.num_nodes:5d} "
            f"{row.step_seconds:9.2f} {one.step_seconds:7.2f} {one.error:+6.1%} {one.layout}"
        )


if __name__ == "__main__":
    sys.exit(main())
