"""Quotas and budgets of teams: whatever a policy decides, they are kept."""

import sys
from pathlib import Path

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

sys.path.insert(0, str(Path(__file__).parent))

from tiny import job, node, option_set, snapshot

from drystone.schedule.check import check_decisions
from drystone.schedule.decision import Preempt, Resize, Start, find_policy
from drystone.schedule.teams import TeamLimit, limit_teams

VALUES = np.array([1.0, 0.25])
OPTIONS = option_set(((1, 0), 4.0), ((2, 0), 7.0), ((0, 1), 1.0), ((0, 2), 1.8), ((2, 2), 8.0))
NODES = [node("a", "A", 4), node("b", "B", 4)]


def taken(made, row: int, option: int) -> float:
    return float(made.counts(row, option) @ VALUES)


def test_what_has_no_room_is_held_with_the_numbers():
    made = snapshot(NODES, [job("1"), job("2")], OPTIONS, {"1": (0, ((0, 1),))})
    found = limit_teams(made, ["t", "t"], {"t": TeamLimit(quota=1.1)}, VALUES)

    assert dict(found.held) == {
        "2": "team t holds or was given 1 of its quota of 1.1; it needs 0.25 at least"
    }
    assert [spec.id for spec in found.snapshot.jobs.specs] == ["1"]
    assert found.stops == ()


def test_others_are_seen_as_they_are():
    made = snapshot(NODES, [job("1"), job("2")], OPTIONS)

    assert limit_teams(made, ["", "x"], {"t": TeamLimit(quota=0.0)}, VALUES).snapshot is made


def test_a_spent_budget_stops_what_runs_and_holds_what_waits():
    made = snapshot(NODES, [job("1"), job("2"), job("3")], OPTIONS, {"1": (0, ((0, 1),))})
    found = limit_teams(made, ["t", "t", "u"], {"t": TeamLimit(spent="all spent")}, VALUES)

    assert [(one.job_id, one.reason) for one in found.stops] == [("1", "all spent")]
    assert dict(found.held) == {"2": "all spent"}
    assert [spec.id for spec in found.snapshot.jobs.specs] == ["3"]


def test_a_lowered_quota_takes_the_last_first():
    running = {"1": (0, ((0, 1),)), "2": (0, ((0, 1),))}
    made = snapshot(NODES, [job("1"), job("2")], OPTIONS, running)
    found = limit_teams(made, ["t", "t"], {"t": TeamLimit(quota=1.5)}, VALUES)

    assert [one.job_id for one in found.stops] == ["2"]


def test_who_waits_for_room_is_not_overtaken_by_its_own_team():
    wide = option_set(((2, 0), 7.0), ((2, 2), 8.0), ((3, 0), 1.0), ((4, 0), 1.0), ((4, 4), 1.0))
    made = snapshot(
        NODES, [job("1"), job("wide"), job("small")],
        {"1": OPTIONS, "wide": wide, "small": OPTIONS}, {"1": (0, ((0, 1),))},
    )  # fmt: skip
    found = limit_teams(made, ["t"] * 3, {"t": TeamLimit(quota=2.0)}, VALUES)

    assert set(found.held) == {"wide", "small"}


@settings(max_examples=60)
@given(
    quota=st.sampled_from([0.0, 0.25, 1.0, 1.5, 2.0, 3.75, 10.0]),
    teams=st.lists(st.sampled_from(["t", "u", ""]), min_size=1, max_size=6),
    num_running=st.integers(0, 3),
    name=st.sampled_from(["prices", "fifo", "shortest"]),
)
def test_no_policy_breaks_a_quota(quota, teams, num_running, name):
    jobs = [job(str(number)) for number in range(len(teams))]
    running = {
        str(number): (2, ((1, 1),)) for number in range(min(num_running, len(teams)))
    }  # one of B each
    made = snapshot(NODES, jobs, OPTIONS, running)
    found = limit_teams(made, teams, {"t": TeamLimit(quota=quota)}, VALUES)
    decisions, _ = find_policy(name)(found.snapshot, None)
    both = [*found.stops, *decisions]

    assert check_decisions(made, both) == []
    held = {spec.id: taken(made, row, int(made.jobs.option[row]))
            for row, spec in enumerate(made.jobs.specs) if made.jobs.option[row] >= 0}  # fmt: skip
    for one in both:
        if isinstance(one, Preempt):
            held.pop(one.job_id)
        elif isinstance(one, Start | Resize):
            held[one.job_id] = taken(made, made.jobs.row_of[one.job_id], one.option)
    of_team = sum(value for job_id, value in held.items() if teams[int(job_id)] == "t")
    assert of_team <= quota + 1e-9
    assert all(found.held.values())


@pytest.mark.parametrize("quota", [0.5, 1.0])
def test_options_beyond_the_quota_are_not_seen(quota):
    made = snapshot(NODES, [job("1")], OPTIONS)
    found = limit_teams(made, ["t"], {"t": TeamLimit(quota=quota)}, VALUES).snapshot

    usable = found.job_speeds[0] > 0
    assert (found.options.counts[found.jobs.option_set[0]] @ VALUES)[usable].max() <= quota
    assert usable.any()
