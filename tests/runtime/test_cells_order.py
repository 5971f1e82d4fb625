"""The order of pipeline stages: every stage can go on, and does each thing once."""

import sys
from pathlib import Path

import pytest

pytest.importorskip("torch")

from drystone.describe.layout import Schedule
from drystone.errors import InvalidSpec
from drystone.run.train.cells.exchange import hidden_regions, inside, overlap
from drystone.run.train.cells.layout import Action, Stage, pipeline_order, stage_actions

sys.path.insert(0, str(Path(__file__).parent))
from cells_cases import CellCase

pytestmark = pytest.mark.torch


def walk(orders: list[list[Action]], num_chunks: int) -> int:
    """Take actions wherever their inputs are there; the most micro-batches of which a rank keeps
    activations. Fails if all stages wait."""
    done: set[Action] = set()
    orders = [list(order) for order in orders]
    kept, most = [0] * len(orders), 0
    while any(orders):
        moved = False
        for stage, order in enumerate(orders):
            while order and needed(order[0], num_chunks) <= done:
                action = order.pop(0)
                done.add(action)
                kept[stage] += 1 if action.is_forward else -1
                most = max(most, kept[stage])
                moved = True
        assert moved, f"all stages wait: {[order[0] for order in orders if order]}"
    return most


def needed(action: Action, num_chunks: int) -> set[Action]:
    if action.is_forward:
        return {Action(True, action.chunk - 1, action.micro)} if action.chunk else set()
    before = {Action(True, action.chunk, action.micro)}
    if action.chunk < num_chunks - 1:
        before.add(Action(False, action.chunk + 1, action.micro))
    return before


@pytest.mark.parametrize("schedule", list(Schedule))
@pytest.mark.parametrize("num_stages", [1, 2, 3, 4, 7])
@pytest.mark.parametrize("each", [1, 2, 4])
def test_every_stage_can_go_on_to_the_end(schedule: Schedule, num_stages: int, each: int):
    for rounds in (1, 2, 3, 5):
        num_micro = rounds * num_stages if each > 1 else rounds
        orders = [
            stage_actions(
                schedule, stage=stage, num_stages=num_stages, num_chunks=num_stages * each,
                num_micro=num_micro,
            )
            for stage in range(num_stages)
        ]  # fmt: skip

        most = walk(orders, num_stages * each)

        every = [action for order in orders for action in order]
        assert len(every) == len(set(every)) == 2 * num_micro * num_stages * each
        if schedule is not Schedule.GPIPE and each == 1:
            assert most == min(num_micro, num_stages)
        if schedule is Schedule.GPIPE:
            assert most == num_micro * each


@pytest.mark.parametrize("schedule", list(Schedule))
@pytest.mark.parametrize("num_stages", [1, 2, 3, 4, 7])
@pytest.mark.parametrize("each", [1, 2, 4])
def test_the_common_order_is_that_of_every_stage_and_what_is_needed_comes_before(
    schedule: Schedule, num_stages: int, each: int
):
    num_chunks = num_stages * each
    for rounds in (1, 2, 3, 5):
        num_micro = rounds * num_stages if each > 1 else rounds
        given = {"num_stages": num_stages, "num_chunks": num_chunks, "num_micro": num_micro}

        order = pipeline_order(schedule, **given)

        for stage in range(num_stages):
            own = [action for action in order if action.chunk % num_stages == stage]
            assert own == stage_actions(schedule, stage=stage, **given)
        places = {action: place for place, action in enumerate(order)}
        for action, place in places.items():
            assert all(places[before] < place for before in needed(action, num_chunks))


def test_the_first_stage_runs_ahead_of_the_second_in_the_common_order():
    order = pipeline_order(Schedule.ONE_F_ONE_B, num_stages=2, num_chunks=2, num_micro=3)

    short = [
        f"{'F' if action.is_forward else 'B'}{action.micro}@{action.chunk}" for action in order
    ]
    assert " ".join(short) == "F0@0 F1@0 F0@1 B0@1 F1@1 B0@0 B1@1 F2@0 F2@1 B1@0 B2@1 B2@0"


def test_interleaving_needs_rounds():
    with pytest.raises(InvalidSpec, match="3 micro-batches cannot be interleaved over 2"):
        stage_actions(Schedule.INTERLEAVED, stage=0, num_stages=2, num_chunks=4, num_micro=3)


def test_what_is_given_away_covers_everything_once():
    stage = Stage(first_rank=3, tp=3, samples=(2, 3, 2), shares=(1, 1, 1))

    given = hidden_regions(stage, 6, 10, splits_sequence=True)

    cells = [(s, p) for samples, positions in given.values() for s in samples for p in positions]
    assert sorted(cells) == [(s, p) for s in range(6) for p in range(10)]
    assert sorted(given) == list(range(3, 12))
    held = hidden_regions(stage, 6, 10, splits_sequence=False)
    assert all(one[1] == range(10) for one in held.values())


def test_boxes_overlap_where_both_are():
    one, other = (range(2, 6), range(5)), (range(4, 9), range(3, 8))

    both = overlap(one, other)

    assert both == (range(4, 6), range(3, 5))
    assert inside(one, both) == (slice(2, 4), slice(3, 5))
    assert overlap(one, (range(6, 9), range(5))) is None


def test_samples_of_all_ranks_are_those_of_the_step_once():
    from drystone.run.train.cells.layout import cell_layout

    case = CellCase(stages=((1, 1, (5,)), (1, 2, (3, 2)), (1, 1, (2, 2, 2))), num_micro=3, batch=14)
    layout = cell_layout(case.plan)

    for stage in layout.stages:
        found = []
        for dp_index in range(stage.dp):
            seat = layout.seat(stage.rank(dp_index, stage.tp - 1))
            found += [sample for run in layout.samples(seat, 100) for sample in run]
        assert sorted(found) == list(range(100, 114))
    assert layout.num_ranks == 8
