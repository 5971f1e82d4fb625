import math
from dataclasses import replace

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from drystone.describe.cluster import NodeSpec
from drystone.describe.job import JobSpec
from drystone.describe.option import OptionSet
from drystone.run.events import Finished, Started, Submitted
from drystone.run.lifecycle import JobState
from drystone.run.option_table import OptionStack
from drystone.run.snapshots import JobColumns, PresentSnapshot, SnapshotMaker, StaleSnapshot
from drystone.run.state import ClusterState, JobRecord
from drystone.schedule.snapshot import JobTable, Snapshot, StartupCost

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


def table_of(columns: JobColumns, now_seconds: float) -> JobTable:
    return columns.table(now_seconds, knows_lengths=True)


def attained_at(one: JobRecord, now_seconds: float) -> float:
    held = now_seconds - one.started_seconds if one.state is JobState.RUNNING else 0.0
    return one.attained_gpu_seconds + one.num_gpus * held


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
        columns.changed.append(one)
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
    assert np.allclose(table.attained_gpu_seconds, [attained_at(one, 10.0) for one in expected])
    assert [math.isnan(one) for one in table.running_since_seconds] == [
        one.option < 0 for one in expected
    ]
    waiting = [one.spec for one in columns.waiting_from(0, 1000)]
    assert waiting == [one.spec for one in expected if one.option < 0]
    sequences = [one.sequence for one in columns.waiting_from(0, 1000)]
    some = [one.sequence for one in columns.waiting_from(sequence, most)]
    assert some == [one for one in sequences if one >= sequence][:most]
    assert all(one < columns.num_seen for one in sequences)


def test_more_jobs_than_the_first_room_holds():
    columns = new_columns()
    for number in range(200):
        columns.changed.append(record(number))

    assert table_of(columns, 0.0).remaining_samples.tolist() == [100.0 + i for i in range(200)]


def new_cluster(num_jobs: int) -> tuple[ClusterState, SnapshotMaker]:
    """A node with 4 GPUs, and jobs that wait for it."""
    maker = SnapshotMaker(("A",), lambda _: OPTIONS, StartupCost())
    state = ClusterState([NodeSpec(id="n0", gpu="A", num_gpus=4)])
    state.log, state.changed = [], maker.changed
    for number in range(num_jobs):
        state.record(Submitted(0.0, record(number).spec))
    return state, maker


def start(state: ClusterState, job_id: str) -> None:
    state.record(Started(1.0, job_id, 1, ((0, 2),), 2.0, 1.0))


def test_tables_that_were_read_do_not_change_later():
    state, maker = new_cluster(2)
    snapshot = PresentSnapshot(maker, state, state.now_seconds)
    jobs, nodes = snapshot.jobs, snapshot.nodes
    start(state, "j0")
    state.record(Finished(2.0, "j0"))
    start_again = PresentSnapshot(maker, state, state.now_seconds)

    assert jobs.option.tolist() == [-1, -1]
    assert jobs.placements == ((), ())
    assert nodes.free.tolist() == [4]
    assert snapshot.jobs is jobs
    assert [spec.id for spec in start_again.jobs.specs] == ["j1"]


@pytest.mark.parametrize("name", ["jobs", "nodes", "rentals", "offers", "spent_dollars"])
def test_what_was_not_read_before_the_cluster_changed_is_refused(name: str):
    state, maker = new_cluster(1)
    snapshot = PresentSnapshot(maker, state, state.now_seconds)
    start(state, "j0")

    with pytest.raises(StaleSnapshot, match=r"keep `snapshot.complete\(\)`"):
        getattr(snapshot, name)
    with pytest.raises(StaleSnapshot):
        snapshot.job_status("j0")


def test_a_complete_snapshot_can_be_kept():
    state, maker = new_cluster(2)
    kept = PresentSnapshot(maker, state, state.now_seconds).complete()
    start(state, "j0")

    assert type(kept) is Snapshot
    assert kept.jobs.option.tolist() == [-1, -1]
    assert kept.nodes.free.tolist() == [4]
    assert kept.job_status("j0").option == -1
    assert [one.sequence for one in kept.waiting_from(1, 9)] == [1]
    assert kept.num_seen == 2


def test_what_is_asked_of_single_jobs_is_what_the_tables_say():
    state, maker = new_cluster(3)
    start(state, "j1")
    present, complete = (
        PresentSnapshot(maker, state, state.now_seconds),
        PresentSnapshot(maker, state, state.now_seconds).complete(),
    )

    for job_id in ("j0", "j1", "j2", "nobody"):
        assert present.job_status(job_id) == complete.job_status(job_id)
        for option in (-1, 0, 1, 2):
            assert present.start_facts(job_id, option) == complete.start_facts(job_id, option)
    assert present.waiting_from(0, 9) == complete.waiting_from(0, 9)
    assert present.waiting_from(1, 1) == complete.waiting_from(1, 1)
    assert list(present.free_by_node()) == list(complete.free_by_node()) == [2]
    assert list(present.node_kinds()) == list(complete.node_kinds())
    assert present.num_seen == complete.num_seen


def test_a_snapshot_with_other_jobs_is_as_good_as_the_first():
    state, maker = new_cluster(1)
    first = PresentSnapshot(maker, state, state.now_seconds)
    jobs = replace(first.jobs, specs=(replace(first.jobs.specs[0], id="x"),))
    other = replace(first, jobs=jobs)

    assert other.job_status("x") == first.job_status("j0")
    assert other.job_status("j0") is None
    assert [one.spec.id for one in other.waiting_from(0, 9)] == ["x"]
    assert other.num_requeued == -1
