"""How right the best Cell is against the plans that Alpa found best and Arena measured."""

import sys
from pathlib import Path

import pytest

sys.path.insert(0, str(Path(__file__).parent))
from arena import Predicted, load_rows, median_error, predict, ranked_pairs


@pytest.fixture(scope="module")
def predictions() -> list[Predicted]:
    found = [predict(row) for row in load_rows()]
    return [one for one in found if one is not None]


def test_all_that_ran_has_a_plan_that_fits(predictions):
    assert len(predictions) == len(load_rows()) == 236


def test_the_best_step_is_as_long_as_measured(predictions):
    assert median_error(predictions) <= 0.15


def test_so_it_is_on_gpus_and_models_that_nothing_was_set_on(predictions):
    held_out = [one for one in predictions if not one.row.is_calibration]

    assert len(held_out) == 178
    assert median_error(held_out) <= 0.15


def test_the_faster_of_two_sets_of_gpus_is_seen_to_be_so(predictions):
    judged = [right for _, _, right in ranked_pairs(predictions)]

    assert len(judged) > 1000
    assert sum(judged) / len(judged) >= 0.90
