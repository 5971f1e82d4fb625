import sys
from pathlib import Path

import numpy as np
import pytest

sys.path.insert(0, str(Path(__file__).parent))
from tiny import job, node, option_set, snapshot

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
    assert make_room(SNAPSHOT).find(np.array(counts), style) == placement


def test_what_is_taken_can_be_given_back():
    room = make_room(SNAPSHOT)
    before = room.free.copy()
    placement = room.place(np.array([7, 2]))
    assert placement is not None
    assert room.free_by_type.tolist() == [1, 0]
    room.give_back(placement)

    assert (room.free == before).all()
    assert (SNAPSHOT.nodes.free == before).all()
