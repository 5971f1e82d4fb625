"""The process group that keeps NCCL's rules for tests: each broken rule is found."""

import math
import sys
from pathlib import Path

import pytest

pytest.importorskip("torch")

sys.path.insert(0, str(Path(__file__).parent))
from nccl_cases import try_rules
from nccl_rules import NCCL_RULES
from ranks import run_ranks

pytestmark = [pytest.mark.torch, pytest.mark.filterwarnings("default"), pytest.mark.slow]


def test_what_would_hang_or_be_wrong_on_nccl_is_found():
    first, second = run_ranks(try_rules, 2, backend=NCCL_RULES)

    assert first["exchange_in_one_order"] == second["exchange_in_one_order"] == 3.0
    for rule, match in (
        ("send_from_both_sides", "rank 1 does the same"),
        ("receive_by_tag_in_another_order", "the orders differ"),
        ("meet_in_two_groups", "creates the communicator of the pair [0, 1]"),
        ("send_to_oneself", "cannot send to itself"),
        ("call_other_collectives", "rank 1 calls 'broadcast from 0"),
        ("call_another_size", "rank 1 calls 'all-reduce, 5 x"),
        ("change_before_waiting", "changed before it was waited for"),
    ):
        assert match in str(first[rule]), rule
    assert math.isnan(second["use_before_waiting"])
    assert math.isnan(first["gather_before_waiting"])
    assert second["change_before_waiting"] == 0.0
