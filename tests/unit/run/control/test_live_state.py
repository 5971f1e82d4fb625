import pytest

from drystone.describe.cluster import NodeSpec
from drystone.describe.files.cluster import ClusterSpec, parse_cluster
from drystone.describe.job import JobSpec, TrainingJob
from drystone.errors import DrystoneError
from drystone.run.control.admission import spent_since
from drystone.run.control.journal import Journal
from drystone.run.control.lesson import Lesson
from drystone.run.control.live_state import LiveState
from drystone.run.control.notes import ClusterDescribed, Described, Drained, Learned
from drystone.run.control.options import type_factors
from drystone.run.control.store import Store
from drystone.run.events import (
    BillSettled,
    Cancelled,
    Failed,
    Finished,
    Interrupted,
    NodeAdded,
    NodeJoined,
    NodeRemoved,
    Paused,
    PriceChanged,
    Progressed,
    RentalAsked,
    RentalFailed,
    Started,
    Stopped,
    Submitted,
    Unpaused,
)
from drystone.run.lifecycle import IllegalTransition, JobState

CLUSTER = parse_cluster(
    "nodes: [{gpu: A100, gpus_per_node: 2}, {gpu: T4, gpus_per_node: 2}]\n"
    "prices: {A100: 2.0, T4: 0.5}"
)
NODES = ClusterDescribed(
    time_seconds=0.0,
    nodes=tuple((one.id, one.gpu, one.num_gpus) for one in CLUSTER.nodes),
    dollars_per_gpu_hour=tuple(sorted(CLUSTER.dollars_per_gpu_hour.items())),
)


def submission(job_id: str = "1", at: float = 1.0) -> list:
    job = TrainingJob(name="a", command=("true",), num_steps=100, global_batch=4)
    spec = JobSpec(id=job_id, submit_seconds=at, model="a", total_samples=400.0, global_batch=4)
    return [
        Described(time_seconds=at, job_id=job_id, job=job),
        Submitted(time_seconds=at, job=spec),
    ]


def started(at: float, job_id: str = "1", placement=((0, 1), (1, 2))) -> Started:
    return Started(
        time_seconds=at, job_id=job_id, option=0, placement=placement, samples_per_second=1.0,
        productive_seconds=at,
    )  # fmt: skip


def folded(*events) -> LiveState:
    live = LiveState(CLUSTER)
    for event in (NODES, *events):
        live.check([event])
        live.record(event)
    return live


def test_money_is_counted_while_a_job_has_gpus():
    live = folded(
        *submission(),
        started(10.0),
        Progressed(time_seconds=20.0, job_id="1", done_samples=8.0, samples_per_second=2.0),
        Stopped(time_seconds=3610.0, job_id="1"),
        started(4000.0, placement=((1, 1),)),
    )

    assert live.dollars_at("1", 4000.0) == pytest.approx(2.0 + 2 * 0.5)
    assert live.dollars_at("1", 4000.0 + 7200) == pytest.approx(3.0 + 1.0)
    assert live.run_seconds_at("1", 4100.0) == pytest.approx(3700.0)


def test_a_price_that_changes_counts_from_its_second_on_for_jobs_and_teams():
    node = NodeSpec(id="rented-t4-0000", gpu="T4", num_gpus=2)
    live = folded(
        RentalAsked(
            time_seconds=0.0, offer="t4", num_nodes=1, first_rental=0, ready_seconds=0.0, reason=""
        ),
        NodeJoined(
            time_seconds=0.0, node=2, rental=0, offer="t4", spec=node, price_dollars_per_hour=2.0
        ),
        *submission(),
        started(3600.0, placement=((2, 1),)),
        PriceChanged(time_seconds=7200.0, offer="t4", price_dollars_per_hour=6.0),
    )

    assert live.dollars_at("1", 7200.0) == pytest.approx(1.0)
    assert live.dollars_at("1", 10_800.0) == pytest.approx(1.0 + 3.0)
    assert spent_since(live, "", 0.0, 10_800.0) == pytest.approx(4.0)
    live.record(Stopped(time_seconds=10_800.0, job_id="1"))
    assert live.dollars_at("1", 20_000.0) == pytest.approx(4.0)
    assert live.spending.since("", 7200.0) == pytest.approx(3.0)
    assert live.run_seconds_at("1", 20_000.0) == pytest.approx(7200.0)


def test_other_prices_hold_from_the_next_start_on():
    dearer = ClusterDescribed(
        time_seconds=30.0, nodes=NODES.nodes, dollars_per_gpu_hour=(("T4-16GB", 5.0),)
    )
    live = folded(*submission(), started(10.0, placement=((1, 1),)), dearer)

    assert live.dollars_at("1", 3610.0) == pytest.approx(0.5)
    live.record(Stopped(time_seconds=3610.0, job_id="1"))
    live.record(started(3610.0, placement=((1, 1),)))
    assert live.dollars_at("1", 7210.0) == pytest.approx(5.5)


def test_faults_are_forgotten_when_a_job_gets_further():
    fault = Interrupted(
        time_seconds=20.0, job_id="1", lost_samples=0.0, kind="crash", retry_seconds=25.0
    )
    live = folded(*submission(), started(10.0), fault)
    job = live.jobs["1"]
    assert (job.faults, job.num_blamed, job.retry_seconds) == ({"crash": 1}, 1, 25.0)

    live.record(started(30.0))
    live.record(Progressed(time_seconds=31.0, job_id="1", done_samples=4.0))
    assert (job.faults, job.num_faults) == ({}, 1)


def test_what_cannot_follow_is_refused_before_it_is_written():
    live = folded(*submission())

    with pytest.raises(IllegalTransition):
        live.check([Finished(time_seconds=2.0, job_id="1")])
    with pytest.raises(DrystoneError, match="twice"):
        live.check(submission())
    with pytest.raises(DrystoneError, match="no job"):
        live.check([Cancelled(time_seconds=2.0, job_id="9")])
    states = live.check([started(2.0), Finished(time_seconds=3.0, job_id="1")])
    assert states == {"1": JobState.DONE}


def test_a_rental_that_was_given_up_cannot_join_nor_be_settled_twice():
    """The log could never be read again."""
    asked = RentalAsked(
        time_seconds=1.0, offer="t4", num_nodes=1, first_rental=0, ready_seconds=2.0, reason=""
    )
    gone = RentalFailed(time_seconds=2.0, rental=0, offer="t4", reason="it did not come")
    joined = NodeJoined(
        time_seconds=3.0, node=2, rental=0, offer="t4", price_dollars_per_hour=0.4,
        spec=NodeSpec(id="rented-t4-0000", gpu="T4-16GB", num_gpus=1),
    )  # fmt: skip
    bill = BillSettled(time_seconds=3.0, rental=0, offer="t4", micro_dollars=0)
    live = folded(*submission(), asked)

    live.check([joined])
    for wrong in ([gone, joined], [gone, gone], [asked], [bill], [gone, bill, bill]):
        with pytest.raises(DrystoneError, match="rental 0"):
            live.check(wrong)
    for event in (gone, bill):
        live.record(event)
    with pytest.raises(DrystoneError, match="rental 0"):
        live.check([joined])


def test_a_paused_job_waits_and_keeps_its_progress():
    live = folded(
        *submission(),
        started(10.0),
        Paused(time_seconds=20.0, job_id="1", reason="later"),
        Progressed(time_seconds=21.0, job_id="1", done_samples=12.0),
    )
    record = live.state.jobs["1"]

    assert (record.state, record.num_gpus, record.done_samples) == (JobState.PAUSED, 0, 12.0)
    assert live.state.free == [2, 2]
    live.record(Unpaused(time_seconds=22.0, job_id="1"))
    live.record(Failed(time_seconds=23.0, job_id="1", reason="no"))
    assert record.state is JobState.FAILED


def test_lessons_add_up():
    live = folded()
    for gpus, measured in (((("A", 1),), 5.0), ((("A", 2), ("B", 1)), 20.0)):
        live.record(
            Learned(
                time_seconds=1.0, job_id="1", work="w", gpus=gpus,
                estimated_samples_per_second=10.0, measured_samples_per_second=measured,
            )
        )  # fmt: skip
    lesson = live.lessons["w"]

    assert lesson.speeds[("A", 1),] == 5.0
    assert type_factors(lesson) == pytest.approx({"A": 1.0, "B": 2.0})
    assert type_factors(Lesson()) == {}


def test_nodes_do_not_change_under_running_jobs():
    live = folded(*submission(), started(10.0))

    with pytest.raises(DrystoneError, match="while jobs run"):
        live.record(ClusterDescribed(time_seconds=20.0, nodes=(("x", "T4-16GB", 1),)))


@pytest.fixture
def journal(tmp_path):
    store = Store(f"sqlite:///{tmp_path}/log.db")
    made = Journal(store, store.acquire("me", lease_seconds=60), CLUSTER, clock=lambda: 100.0)
    yield made
    store.close()


def test_policies_do_not_see_who_is_held_back_nor_drained_nodes(journal):
    for number in ("1", "2", "3"):
        journal.commit(submission(number, at=100.0))
    journal.commit([Paused(time_seconds=100.0, job_id="1")])
    journal.commit([started(100.0, "2", ((0, 1),))])
    journal.commit(
        [Interrupted(time_seconds=100.0, job_id="2", lost_samples=0.0, retry_seconds=160.0)]
    )
    journal.commit([Drained(time_seconds=100.0, node="a100-0")])
    snapshot = journal.snapshot()

    assert [spec.id for spec in snapshot.jobs.specs] == ["3"]
    assert snapshot.nodes.num_gpus.tolist() == [0, 2]
    assert snapshot.nodes.free.tolist() == [0, 2]
    assert journal.next_retry() == 160.0


def test_a_clock_that_goes_back_does_no_harm(journal):
    journal.commit(submission("1", at=500.0))

    assert journal.now() == 500.0
    journal.commit([Cancelled(time_seconds=journal.now(), job_id="1")])


def test_the_log_leads_to_the_same_state(journal):
    journal.commit(submission("1", at=100.0))
    journal.commit([started(100.0)])
    before = journal.live
    after = Journal(journal.store, journal.lease, CLUSTER, clock=lambda: 100.0).live

    assert after.state.jobs["1"].placement == before.state.jobs["1"].placement
    assert after.dollars_at("1", 200.0) == before.dollars_at("1", 200.0) > 0
    assert after.num_events == before.num_events


def with_nodes(text: str):
    return parse_cluster(f"nodes: [{text}]\nprices: {{A100: 2.0, T4: 0.5, L4: 0.7}}")


A100, T4, L4 = (
    "{gpu: A100, gpus_per_node: 2, name: a100-0}",
    "{gpu: T4, gpus_per_node: 2, name: t4-1}",
    "{gpu: L4, gpus_per_node: 4, name: l4-new}",
)


def shape_of(state) -> tuple:
    nodes = [(one.id, one.gpu, one.num_gpus) for one in state.nodes]
    return nodes, state.free, state.gone, state.lost


def again(journal, cluster) -> Journal:
    return Journal(journal.store, journal.lease, cluster, clock=lambda: 100.0)


def test_nodes_join_and_leave_and_the_log_knows_it(journal):
    journal.commit(submission("1", at=100.0))
    journal.commit([started(100.0, placement=((0, 1),))])
    bigger, other = with_nodes(f"{A100}, {T4}, {L4}"), with_nodes(f"{A100}, {L4}")
    journal.adopt(bigger, reason="")

    assert journal.snapshot().nodes.num_gpus.tolist() == [2, 2, 4]
    assert len(journal.options_of(journal.live.state.jobs["1"].spec)) == 2 + 2 + 4
    journal.adopt(other, reason="", left={"t4-1": "switched off"})
    assert journal.snapshot().nodes.num_gpus.tolist() == [2, 0, 4]
    assert len(journal.options_of(journal.live.state.jobs["1"].spec)) == 2 + 4
    assert journal.live.state.jobs["1"].state is JobState.RUNNING  # it was on another node
    restarted = again(journal, other)
    assert shape_of(restarted.live.state) == shape_of(journal.live.state)
    assert restarted.sequence == journal.sequence  # nothing new to tell


def test_a_row_that_is_gone_is_used_again_by_the_same_type(journal):
    journal.adopt(with_nodes(A100), reason="")
    again_t4 = "{gpu: T4, gpus_per_node: 4, name: t4-later}"
    journal.adopt(with_nodes(f"{A100}, {L4}, {again_t4}"), reason="")

    names = [one.id for one in journal.live.state.nodes]
    assert names == ["a100-0", "t4-later", "l4-new"]
    assert journal.live.state.free == [2, 4, 4]
    assert not journal.live.state.gone


def test_after_a_restart_only_jobs_on_missing_nodes_are_interrupted(journal):
    for number, row in (("1", 0), ("2", 1)):
        journal.commit(submission(number, at=100.0))
        journal.commit([started(100.0, number, ((row, 1),))])
    states = again(journal, with_nodes(f"{A100}, {L4}")).live.state.jobs

    assert states["1"].state is JobState.RUNNING
    assert states["2"].state is JobState.QUEUED


def test_a_cluster_may_begin_without_nodes(tmp_path):
    store = Store(f"sqlite:///{tmp_path}/log.db")
    lease = store.acquire("me", lease_seconds=60)
    empty = Journal(store, lease, ClusterSpec(nodes=()), clock=lambda: 100.0)
    empty.commit(submission("1", at=100.0))
    assert empty.snapshot().nodes.num_gpus.tolist() == []
    empty.adopt(with_nodes(A100), reason="")
    empty.commit([started(100.0, placement=((0, 1),))])
    later = again(empty, with_nodes(A100))

    assert later.live.state.jobs["1"].state is JobState.RUNNING
    assert later.live.state.free == [1]
    store.close()


def test_a_node_that_is_not_to_be_used_does_not_join(tmp_path):
    store = Store(f"sqlite:///{tmp_path}/log.db")
    lease = store.acquire("me", lease_seconds=60)
    journal = Journal(store, lease, CLUSTER, clock=lambda: 100.0, joining=lambda *_: None)
    journal.adopt(with_nodes(f"{A100}, {T4}, {L4}"), reason="")

    assert len(journal.live.state.nodes) == 2
    store.close()


def test_nodes_that_cannot_leave_are_refused_before_it_is_written(journal):
    journal.commit(submission("1", at=100.0))
    journal.commit([started(100.0, placement=((0, 1),))])
    spec = journal.live.state.nodes[1]
    for event in (
        NodeRemoved(time_seconds=100.0, node=0),
        NodeRemoved(time_seconds=100.0, node=7),
        NodeAdded(time_seconds=100.0, node=5, spec=spec),
        NodeAdded(time_seconds=100.0, node=1, spec=spec),
    ):
        before = journal.sequence
        with pytest.raises(DrystoneError):
            journal.commit([event])
        assert journal.sequence == before
