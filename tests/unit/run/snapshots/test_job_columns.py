import math
from dataclasses import replace

import numpy as np
from hypothesis import given
from hypothesis import strategies as st

from drystone.describe.job import JobSpec
from drystone.describe.option import OptionSet
from drystone.run.events import Submitted
from drystone.run.lifecycle import JobState
from drystone.run.option_table import OptionStack
from drystone.run.snapshots.job_columns import JobColumns
from drystone.run.snapshots.lazy_tables import LazyJobTable
from drystone.run.state import ClusterState, JobRecord

OPTIONS = OptionSet(
    counts=np.array([[1], [2]]), samples_per_second=np.array([1.0, 2.0]), memory_bytes=np.zeros(2)
)


def record(number: int) -> JobRecord:
    spec = JobSpec(id=f"j{number}", submit_seconds=0, model="m", total_samples=100.0 + number)
    job = ClusterState([]).record(Submitted(0.0, spec))
    assert job is not None
    return job


def new_columns() -> JobColumns:
    return JobColumns(OptionStack(("A",), lambda _: OPTIONS))


def table_of(columns: JobColumns, now_seconds: float) -> LazyJobTable:
    return LazyJobTable.of(columns, now_seconds, 0, True)


def run(one: JobRecord) -> None:
    one.state, one.option, one.placement, one.num_gpus = JobState.RUNNING, 1, ((0, 2),), 2
    one.samples_per_second, one.counted_seconds, one.started_seconds = 2.0, 5.0, 4.0


steps_of = st.lists(
    st.tuples(st.sampled_from("asdpur"), st.integers(0, 200), st.booleans()), max_size=150
)


@given(steps=steps_of, sequence=st.integers(0, 60), most=st.integers(1, 70))
def test_the_table_is_what_the_records_say(steps, sequence: int, most: int):
    """Whatever is added, started, paused and removed, in which order, and read in between."""
    columns, kept, paused, sequences = new_columns(), {}, {}, {}
    for number, (step, pick, is_read) in enumerate(steps):
        if step == "u" and paused:
            one = paused.pop(sorted(paused)[pick % len(paused)])
            one.state = JobState.QUEUED
            kept[one.spec.id] = one
        elif step == "a" or not kept:
            one = record(number)
            kept[one.spec.id] = one
        else:
            name = sorted(kept)[pick % len(kept)]
            one = kept[name]
            if step == "d":
                one.state = JobState.DONE
                del kept[name]
            elif step == "p" and one.option < 0:
                one.state = JobState.PAUSED
                paused[name] = kept.pop(name)
            else:
                run(one)
        columns.touch(one)
        if is_read:
            _ = table_of(columns, 0.0).option

    table = table_of(columns, 10.0)

    expected = sorted(kept.values(), key=lambda one: int(one.spec.id[1:]))
    assert len(table) == len(expected)
    assert [spec.id for spec in table.specs] == [one.spec.id for one in expected]
    assert table.option.tolist() == [one.option for one in expected]
    assert table.placements == tuple(one.placement for one in expected)
    left = [one.spec.total_samples - one.done_at(10.0) for one in expected]
    assert np.allclose(table.remaining_samples, left)
    assert np.allclose(table.attained_gpu_seconds, [one.attained_at(10.0) for one in expected])
    assert [math.isnan(one) for one in table.running_since_seconds] == [
        one.option < 0 for one in expected
    ]
    for one in expected:
        status = table.status(one.spec.id)
        assert (status.option, status.placement) == (one.option, one.placement)
    waiting = [one.spec for one in table.waiting_from(0, 1000)]
    assert waiting == [one.spec for one in expected if one.option < 0]
    sequences = [one.sequence for one in table.waiting_from(0, 1000)]
    some = [one.sequence for one in table.waiting_from(sequence, most)]
    assert some == [one for one in sequences if one >= sequence][:most]
    assert all(one < table.num_seen for one in sequences)


def test_more_jobs_than_the_first_room_holds():
    columns = new_columns()
    for number in range(200):
        columns.touch(record(number))

    assert table_of(columns, 0.0).remaining_samples.tolist() == [100.0 + i for i in range(200)]


def test_a_table_that_is_kept_does_not_change_later():
    columns, first, second = new_columns(), record(1), record(2)
    columns.touch(first)
    columns.touch(second)
    before = table_of(columns, 0.0)
    before.keep()
    first.state = JobState.DONE
    columns.touch(first)
    after = table_of(columns, 0.0)

    assert len(before) == 2
    assert before.option.tolist() == [-1, -1]
    assert before.status("j1").option == -1
    assert [one.sequence for one in before.waiting_from(0, 9)] == [0, 1]
    assert [one.sequence for one in before.waiting_from(1, 9)] == [1]
    assert before.num_seen == 2
    assert [one.sequence for one in after.waiting_from(0, 9)] == [1]
    assert after.status("j1") is None


def test_a_table_with_other_specs_is_as_good_as_the_first():
    columns = new_columns()
    columns.touch(record(1))
    first = table_of(columns, 0.0)
    other = replace(first, specs=(replace(first.specs[0], id="x"),))

    assert other.status("x") == first.status("j1")
    assert other.status("j1") is None
    assert [one.spec.id for one in other.waiting_from(0, 9)] == ["x"]
    assert other.num_requeued == -1
