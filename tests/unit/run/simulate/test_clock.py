"""Does what is planned happen in its order, however much of it there is, and whenever planned?"""

import heapq
import math
from dataclasses import replace

import pytest
from hypothesis import given
from hypothesis import strategies as st

from drystone.describe.cluster import NodeSpec
from drystone.describe.job import JobSpec
from drystone.describe.option import OptionSet
from drystone.errors import DrystoneError
from drystone.run.events import Finished, Started, Submitted
from drystone.run.lifecycle import IllegalTransition
from drystone.run.simulate.clock import VirtualTime
from drystone.run.snapshots import PresentSnapshot, SnapshotMaker
from drystone.run.state import ClusterState
from drystone.schedule.snapshot import StartupCost

NODES = [NodeSpec(id="n0", gpu="A", num_gpus=4)]
SPEC = JobSpec(id="j", submit_seconds=0.0, model="m", total_samples=10.0)


def no_options(_: JobSpec) -> OptionSet:
    raise AssertionError("nobody asks")


def new_time() -> VirtualTime:
    maker = SnapshotMaker(("A",), no_options, StartupCost())
    return VirtualTime(ClusterState(NODES), maker)


# Few whole seconds, so that much is due at one time.
seconds = st.integers(0, 40).map(float)


@given(
    first=st.lists(seconds, max_size=300),
    jobs=st.lists(seconds, max_size=300),
    delays=st.lists(seconds, max_size=300),
    steps=st.sampled_from([0.0, 1.0, 7.0]),
)
def test_it_is_a_heap_of_what_is_planned_with_the_jobs_first(first, jobs, delays, steps):
    """Every call plans another one, some time later, while there are delays left."""
    time, happened = new_time(), []
    expected: list[tuple[float, int, str]] = []
    left, numbers = iter(delays), iter(range(1, 10_000))

    def happen(now: float, name: str) -> None:
        happened.append((now, name))
        delay = next(left, None)
        if delay is not None:
            plan(now + delay)

    def plan(at: float) -> None:
        number = next(numbers)
        heapq.heappush(expected, (at, number, str(number)))
        time.later(at, happen, str(number))

    for at in first:
        plan(at)
    specs = [replace(SPEC, id=f"j{i}", submit_seconds=at) for i, at in enumerate(jobs)]
    for order, spec in enumerate(sorted(specs, key=lambda one: one.submit_seconds)):
        heapq.heappush(expected, (spec.submit_seconds, order - len(specs), spec.id))
    time.expect(specs, lambda now, spec: happened.append((now, spec.id)))
    while time.next_seconds() < math.inf:
        assert time.next_seconds() == expected[0][0]
        num_before = len(happened)
        if steps:
            time.run_until(math.ceil(time.next_seconds() / steps) * steps)
        else:
            time.step()
        assert len(happened) > num_before
        for one in happened[num_before:]:
            at, _, name = heapq.heappop(expected)
            assert one == (at, name)

    assert expected == []


def test_time_that_passes_without_an_event_makes_another_present():
    time = new_time()
    before = PresentSnapshot(time.maker, time.state, time.now_seconds)
    time.later(5.0, lambda _: None)
    time.step()
    after = PresentSnapshot(time.maker, time.state, time.now_seconds)

    assert (before.now_seconds, after.now_seconds) == (0.0, 5.0)
    assert before.nodes.free.tolist() == after.nodes.free.tolist() == [4]


def test_a_job_finishes_when_its_work_is_done_unless_it_goes_on_otherwise():
    time = new_time()
    time.expect([SPEC], lambda now, spec: time.record(Submitted(now, spec)))
    time.step()
    job = time.record(Started(0.0, "j", 0, ((0, 2),), 2.0, 1.0))
    assert job is not None
    time.finish_when_done(job)
    assert time.next_seconds() == 6.0
    job.num_changes += 1  # as a change of speed does
    time.step()
    assert [type(one) for one in time.log] == [Submitted, Started]
    time.finish_when_done(job)
    time.step()

    assert time.log[-1] == Finished(6.0, "j")
    assert (time.state.free, time.state.num_running, time.state.active) == ([4], 0, {})


def test_what_cannot_happen_to_a_job_is_refused_with_its_story():
    time = new_time()
    time.record(Submitted(0.0, SPEC))
    with pytest.raises(IllegalTransition, match="is queued and cannot take Finished"):
        time.record(Finished(1.0, "j"))
    time.record(Started(2.0, "j", 0, ((0, 2),), 2.0, 1.0))
    with pytest.raises(IllegalTransition, match="So far: Started at 2 s"):
        time.record(Started(3.0, "j", 0, ((0, 2),), 2.0, 1.0))
    with pytest.raises(DrystoneError, match="no job 'x'"):
        time.record(Finished(3.0, "x"))
    with pytest.raises(DrystoneError, match="twice"):
        time.record(Submitted(3.0, SPEC))
    with pytest.raises(DrystoneError, match="comes after"):
        time.record(Finished(1.0, "j"))

    assert [type(one) for one in time.log] == [Submitted, Started]
