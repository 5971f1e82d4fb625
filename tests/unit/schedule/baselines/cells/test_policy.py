"""The policy `cells`: placement, bubbles, the searches down and up, opportunism, deadlines."""

import sys
from dataclasses import replace
from pathlib import Path

import numpy as np

sys.path.insert(0, str(Path(__file__).parents[2]))
from tiny import job, node, option_set, snapshot

from drystone.schedule.baselines.cells.board import Board
from drystone.schedule.baselines.cells.policy import cells, cells_deadline
from drystone.schedule.baselines.cells.search import fit_job, make_cells, upgrade
from drystone.schedule.check import check_decisions
from drystone.schedule.decision import Move, Preempt, Refuse, Resize, Start
from drystone.schedule.snapshot import Snapshot

POWERS = option_set(([1], 10.0), ([2], 18.0), ([4], 30.0), ([8], 40.0))


def board_of(given: Snapshot) -> Board:
    """The running jobs of a snapshot, whose options are one of each level."""
    board, table = Board(given.nodes, len(given.jobs)), make_cells(given)
    for row in np.flatnonzero(given.jobs.is_running).tolist():
        counts = given.counts(row, int(given.jobs.option[row]))
        kind = int(counts.argmax())
        level = table.levels.tolist().index(int(counts[kind]))
        board.register(row, kind, level, given.jobs.placements[row])
    return board


def decided(given: Snapshot, policy=cells, memory=None) -> dict[str, object]:
    decisions, _ = policy(given, memory)
    assert check_decisions(given, decisions) == []
    return {one.job_id: one for one in decisions}


def test_halving_and_doubling_go_to_the_next_cell():
    table = make_cells(
        snapshot([node("a", num_gpus=8)], [job("one")], option_set(([6], 9.0), ([1], 2.0)))
    )

    assert table.levels.tolist() == [1, 3, 6]
    assert table.down[0, 0].tolist() == [-1, 0, 0]  # 3 is no Cell, so 6 goes to 1
    assert table.up[0, 0].tolist() == [-1, 2, -1]  # from 1 at most 2, and there is none


def test_options_that_mix_types_are_no_cells():
    mixed = option_set(([1, 1], 9.0), ([0, 2], 5.0))

    table = make_cells(snapshot([node("a", "A"), node("b", "B")], [job("one")], mixed))

    assert (table.options[0] >= 0).sum() == 1
    assert table.options[0, 1, table.levels.tolist().index(2)] == 1


def test_idle_nodes_come_first_then_the_emptiest():
    given = snapshot([node("a"), node("b"), node("c")], [job(str(one)) for one in range(4)], POWERS)
    board = Board(given.nodes, 4)

    assert all(board.place(row, 0, 0, 1) for row in range(3))
    assert board.placements == {0: ((0, 1),), 1: ((1, 1),), 2: ((2, 1),)}
    board.remove(1)
    board.place(3, 0, 1, 2)
    assert board.placements[3] == ((1, 2),)


def test_bubbles_are_moved_so_that_a_whole_node_is_free():
    running = {"0": (1, ((0, 2),)), "1": (1, ((1, 2),))}
    given = snapshot([node("a"), node("b")], [job(str(one)) for one in range(3)], POWERS, running)
    board = board_of(given)

    assert board.place(2, 0, 2, 4)

    assert sorted(board.placements[0] + board.placements[1]) in (
        [(0, 2), (0, 2)],
        [(1, 2), (1, 2)],
    )
    assert board.free.tolist() == [0, 0]
    assert board.halvings == {}


def test_bubbles_fill_one_node_where_both_are_more_than_half_full():
    """Three and three of four: only two jobs of 1 and 2 can be told apart and moved."""
    running = {"0": (1, ((0, 2),)), "1": (0, ((0, 1),)), "2": (1, ((1, 2),)), "3": (0, ((1, 1),))}
    given = snapshot([node("a"), node("b")], [job(str(one)) for one in range(5)], POWERS, running)
    board = board_of(given)

    assert board.place(4, 0, 1, 2)
    assert board.free.tolist() == [0, 0]
    assert len(board.placements[4]) == 1


def test_bubbles_are_not_moved_to_a_node_that_is_too_small():
    """Two of four GPUs are taken on one node, one of two on the other of the same type."""
    running = {"0": (1, ((0, 2),)), "1": (0, ((1, 1),))}
    options = option_set(([1], 10.0), ([2], 18.0), ([3], 20.0))
    nodes = [node("a", num_gpus=4), node("b", num_gpus=2)]
    given = snapshot(nodes, [job(str(one)) for one in range(3)], options, running)
    board = board_of(given)

    assert not board.place(2, 0, 2, 3)
    assert board.free.tolist() == [2, 1]


def test_what_cannot_be_put_together_is_spread_and_slower():
    """Jobs of 3 on nodes of 4 leave one GPU each; nothing can be moved together."""
    threes = option_set(([3], 9.0), ([2], 6.0))
    running = {"0": (0, ((0, 3),)), "1": (0, ((1, 3),))}
    given = snapshot([node("a"), node("b")], [job(str(one)) for one in range(3)], threes, running)

    plan = fit_job(make_cells(given), board_of(given), 2, kind=0, level=1, depth=0)

    assert plan is not None
    assert plan.board.placements[2] == ((0, 1), (1, 1))
    assert plan.gain == 6.0 * 0.9


def test_a_running_job_shrinks_if_that_is_worth_most():
    running = {"0": (2, ((0, 4),))}
    given = snapshot([node("a")], [job("0"), job("1", requested_gpu="A", requested_count=2)],
                     POWERS, running)  # fmt: skip

    found = decided(given)

    assert isinstance(found["0"], Resize)
    assert found["0"].option == 1
    assert isinstance(found["1"], Start)
    assert found["1"].option == 1


def test_a_job_changes_its_type_where_there_is_room():
    options = option_set(([2, 0], 18.0), ([0, 2], 17.0))
    running = {"0": (0, ((0, 2),))}
    nodes = [node("a", "A", 2), node("b", "B", 2)]
    jobs = [job("0"), job("1", requested_gpu="A", requested_count=2)]

    found = decided(snapshot(nodes, jobs, options, running))

    # Nobody can shrink; moving the old or the new job to B gains alike, and the first is taken.
    assert sum(isinstance(one, Start) for one in found.values()) == 1
    assert {one.job_id for one in found.values()} <= {"0", "1"}


def test_the_step_up_that_gains_most_is_made_first():
    quick, slow = option_set(([1], 10.0), ([2], 19.0)), option_set(([1], 1.0), ([2], 2.0))
    running = {"0": (0, ((0, 1),)), "1": (0, ((0, 1),))}
    given = snapshot(
        [node("a", num_gpus=3)], [job("0"), job("1")], {"0": slow, "1": quick}, running
    )
    board = board_of(given)

    assert upgrade(make_cells(given), board) == 1
    assert upgrade(make_cells(given), board) is None  # no GPU is left


def test_a_later_job_may_run_before_an_older_one_and_is_stopped_for_it():
    large, small = option_set(([4], 40.0)), option_set(([2], 5.0))
    jobs = [job("old"), job("large"), job("small")]
    options = {"old": small, "large": large, "small": small}
    nodes = [node("a")]
    first = snapshot(nodes, jobs, options, {"old": (0, ((0, 2),))})
    decisions, memory = cells(first, None)
    assert [(type(one), one.job_id) for one in decisions] == [(Start, "small")]
    assert memory.opportunists == {"small"}

    later = snapshot(nodes, jobs[1:], options, {"small": (0, decisions[0].placement)})
    found = decided(later, memory=memory)

    assert isinstance(found["large"], Start)
    assert isinstance(found["small"], Preempt)


def test_nothing_is_decided_where_nothing_came_or_went():
    given = snapshot([node("a")], [job("0"), job("1")], POWERS, {"0": (1, ((0, 2),))})
    decisions, memory = cells(given, None)
    given = snapshot([node("a")], [job("0"), job("1")], option_set(([4], 40.0)))
    memory = replace(memory, free=given.nodes.free)

    assert decisions
    assert cells(given, memory)[0] == []


def test_pointless_moves_are_undone():
    """Three single jobs and bubbles: whoever keeps its Cell stays where that is possible."""
    running = {"0": (0, ((0, 1),)), "1": (0, ((1, 1),))}
    ones = option_set(([1], 10.0), ([2], 11.0))
    jobs = [job("0"), job("1"), job("2", requested_gpu="A", requested_count=2)]
    given = snapshot([node("a", num_gpus=2), node("b", num_gpus=2)], jobs, ones, running)

    found = decided(given)

    assert isinstance(found["2"], Start)
    assert sum(isinstance(one, Move) for one in found.values()) <= 1


def test_with_deadlines_only_cells_in_time_are_taken():
    """100 samples at 10 a second: 10 s, and a round of 300 s."""
    nodes = [node("a", num_gpus=8)]
    soon = job("soon", samples=10_000, deadline_seconds=700.0, requested_gpu="A", requested_count=1)
    late = job("late", samples=10_000, deadline_seconds=400.0)

    found = decided(snapshot(nodes, [soon, late], POWERS), policy=cells_deadline)

    assert isinstance(found["soon"], Start)
    assert POWERS.samples_per_second[found["soon"].option] >= 10_000 / 400
    assert isinstance(found["late"], Refuse)
    assert "deadline" in found["late"].reason
