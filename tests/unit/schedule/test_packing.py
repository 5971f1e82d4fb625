import sys
from pathlib import Path

import numpy as np
import pytest

sys.path.insert(0, str(Path(__file__).parent))
from tiny import job, node, option_set, snapshot

from drystone.schedule import packing
from drystone.schedule.packing import make_room

NODES = [node("a0"), node("a1"), node("a2"), node("b0", "B", 2)]
OPTIONS = option_set(([1, 0], 1.0), ([3, 0], 2.0))
SNAPSHOT = snapshot(
    NODES, [job("x"), job("y")], OPTIONS, running={"x": (0, ((1, 1),)), "y": (1, ((2, 3),))}
)


@pytest.mark.parametrize(
    ("counts", "style", "placement"),
    [
        ([1, 0], "tight", ((2, 1),)),
        ([1, 0], "scatter", ((0, 1),)),
        ([2, 0], "tight", ((1, 2),)),
        ([4, 0], "tight", ((0, 4),)),
        ([7, 0], "tight", ((0, 4), (1, 3))),
        ([8, 0], "tight", None),  # two whole nodes are not free
        ([9, 0], "tight", None),
        ([1, 2], "tight", ((2, 1), (3, 2))),
        ([0, 3], "tight", None),
    ],
)
def test_a_job_goes_on_as_few_nodes_as_its_count_needs(counts, style, placement):
    room = make_room(SNAPSHOT)

    # Asked for often, a type gets heaps; they give the same places.
    assert [room.find(np.array(counts), style) for _ in range(5)] == [placement] * 5


@pytest.mark.parametrize("style", ["tight", "scatter"])
@pytest.mark.parametrize("seed", range(5))
def test_places_are_the_same_with_heaps_and_without(style, seed, monkeypatch):
    chance = np.random.default_rng(seed)
    nodes = [node(f"n{index}", "A", 8) for index in range(12)]
    seen = snapshot(nodes, [job("x")], option_set(([1], 1.0)))

    def places(few: int) -> list[object]:
        monkeypatch.setattr(packing, "_MAX_WITHOUT_HEAPS", few)
        room, held, found = make_room(seen), [], []
        draw = np.random.default_rng(seed)
        for number in chance_numbers:
            if held and draw.random() < 0.4:
                room.give_back(held.pop(int(draw.integers(len(held)))))
            found.append(room.place([number], style))
            if found[-1] is not None:
                held.append(found[-1])
        return found

    chance_numbers = chance.choice([1, 2, 3, 4, 6, 8, 11, 16, 24], 60).tolist()
    assert places(0) == places(1000)


def test_what_is_taken_can_be_given_back():
    room = make_room(SNAPSHOT)
    before = room.free.copy()
    placement = room.place(np.array([7, 2]))
    assert placement is not None
    assert room.free_by_type.tolist() == [1, 0]
    room.give_back(placement)

    assert (room.free == before).all()
    assert (SNAPSHOT.nodes.free == before).all()
