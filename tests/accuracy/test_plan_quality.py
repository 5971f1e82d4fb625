"""Are plans good, and not only estimates right? Judged by times that others measured."""

import sys
from pathlib import Path

import pytest

pytest.importorskip("torch")  # ranks that learn their division live beside it

sys.path.insert(0, str(Path(__file__).parent))
from cephalo import CASES, Case

IDS = [f"{case.model}-{case.dtype}-{len(case.cluster)}" for case in CASES]
pytestmark = [pytest.mark.torch]


@pytest.mark.parametrize("case", CASES, ids=IDS)
def test_with_profiles_a_split_is_within_two_percent_of_the_best(case: Case):
    assert case.judged(case.plan(is_measured=True)) <= 1.02 * case.best()


@pytest.mark.parametrize("case", CASES, ids=IDS)
def test_a_split_from_wrong_estimates_is_mended_within_fifty_steps(case: Case):
    """To within 3 % of the split that the true times give."""
    wrong, right = case.plan(is_measured=False), case.plan(is_measured=True)

    assert case.judged(wrong) > 1.05 * case.judged(right)  # or this shows nothing
    assert case.learned(wrong, 50) <= 1.03 * case.judged(right)
