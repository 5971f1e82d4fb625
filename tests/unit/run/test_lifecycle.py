import pytest

from drystone.run.events import Finished, Started, Stopped
from drystone.run.lifecycle import TERMINAL, TRANSITIONS, IllegalTransition, JobState, next_state

STARTED = Started(
    time_seconds=1,
    job_id="a",
    option=0,
    placement=((0, 1),),
    samples_per_second=1,
    productive_seconds=1,
)


def test_nothing_happens_to_a_job_that_is_over():
    assert not [move for move in TRANSITIONS if move[0] in TERMINAL]


def test_every_state_but_the_first_is_reached():
    assert set(TRANSITIONS.values()) == set(JobState)


def test_the_table_is_followed():
    assert next_state("a", JobState.QUEUED, STARTED) is JobState.RUNNING
    assert next_state("a", JobState.RUNNING, Stopped(time_seconds=2, job_id="a")) is JobState.QUEUED


def test_an_illegal_move_tells_the_story():
    with pytest.raises(IllegalTransition, match=r"queued.*Finished at 5 s.*Started at 1 s"):
        next_state("a", JobState.QUEUED, Finished(time_seconds=5, job_id="a"), [STARTED])
