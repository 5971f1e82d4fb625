import math

import numpy as np
from hypothesis import given
from hypothesis import strategies as st

from drystone.describe.job import JobSpec
from drystone.run.job_columns import JobColumns
from drystone.run.lifecycle import JobState
from drystone.run.state import JobRecord


def record(number: int) -> JobRecord:
    spec = JobSpec(id=f"j{number}", submit_seconds=0, model="m", total_samples=100.0 + number)
    return JobRecord(spec=spec, waiting_seconds=0.0)


@given(steps=st.lists(st.tuples(st.sampled_from("asd"), st.integers(0, 200)), max_size=150))
def test_the_table_is_what_the_records_say(steps):
    """Whatever is added, started and removed, and in which order."""
    columns, kept = JobColumns(), {}
    for number, (step, pick) in enumerate(steps):
        name = sorted(kept)[pick % len(kept)] if kept else None
        if step == "a" or name is None:
            new = record(number)
            kept[new.spec.id] = new
            columns.update(new, number % 3, -2)
        elif step == "s":
            one = kept[name]
            one.state, one.option, one.placement, one.num_gpus = JobState.RUNNING, 1, ((0, 2),), 2
            one.samples_per_second, one.counted_seconds, one.started_seconds = 2.0, 5.0, 4.0
            columns.update(one, int(columns.table(0.0).row_of[name]) % 3, -2)
        else:
            del kept[name]
            columns.remove(name)

    table = columns.table(10.0)

    expected = list(kept.values())
    assert [spec.id for spec in table.specs] == [one.spec.id for one in expected]
    assert table.option.tolist() == [one.option for one in expected]
    assert table.placements == tuple(one.placement for one in expected)
    left = [one.spec.total_samples - one.done_at(10.0) for one in expected]
    assert np.allclose(table.remaining_samples, left)
    assert np.allclose(table.attained_gpu_seconds, [one.attained_at(10.0) for one in expected])
    assert [math.isnan(one) for one in table.running_since_seconds] == [
        one.option < 0 for one in expected
    ]


def test_more_jobs_than_the_first_room_holds():
    columns = JobColumns()
    for number in range(200):
        columns.update(record(number), 0, -1)

    assert columns.table(0.0).remaining_samples.tolist() == [100.0 + i for i in range(200)]


def test_a_snapshot_does_not_change_later():
    columns = JobColumns()
    columns.update(record(1), 0, -1)
    before = columns.table(0.0)
    columns.remove("j1")

    assert len(before) == 1
    assert before.option.tolist() == [-1]
