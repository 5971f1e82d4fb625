"""When a waiting job should start: the loop in virtual time, from a copy of a journal's state."""

from pathlib import Path

import pytest

from drystone.describe.files.cluster import parse_cluster
from drystone.describe.files.job import make_job
from drystone.describe.job import make_spec
from drystone.run.control.forecast import copy_present, forecast_start
from drystone.run.control.journal import Journal
from drystone.run.control.notes import Described, Drained
from drystone.run.control.store import Store
from drystone.run.events import Interrupted, Paused, Started, Submitted
from drystone.run.lifecycle import JobState
from drystone.schedule.decision import find_policy
from drystone.schedule.snapshot import StartupCost

NOW = 1_000_000.0
STARTUP = StartupCost(seconds_per_gpu=5.0, most_seconds=5.0)
ONE_GPU = "nodes:\n  - {gpu: T4, gpus_per_node: 1, emulate: {speed: 0.001, memory: 4GiB}}"
TWO_NODES = ONE_GPU.replace("gpu: T4, ", "gpu: T4, count: 2, ")


@pytest.fixture
def make_journal(tmp_path: Path):
    """A journal over a cluster, at a time that stands still."""
    stores = []

    def make(cluster: str = ONE_GPU) -> Journal:
        store = Store(f"sqlite:///{tmp_path / 'log.db'}")
        stores.append(store)
        lease = store.acquire("test", lease_seconds=1e6)
        assert lease is not None
        return Journal(store, lease, parse_cluster(cluster), startup=STARTUP, clock=lambda: NOW)

    yield make
    for store in stores:
        store.close()


def submit(journal: Journal, *, seconds: float) -> str:
    """A script that takes so long on one T4: of those, assumed speed is one sample a second."""
    table = {"command": "python x.py", "train": {"steps": round(seconds), "batch": 1}}
    job = make_job(table | {"gpus": {"max": 1}}, folder=Path("/"))
    job_id = str(len(journal.live.state.jobs) + 1)
    spec = make_spec(job, None, job_id=job_id, submit_seconds=NOW)
    journal.commit(
        [
            Described(time_seconds=NOW, job_id=job_id, job=job, client_key=""),
            Submitted(time_seconds=NOW, job=spec),
        ]
    )
    return job_id


def start(journal: Journal, job_id: str, node: int = 0) -> None:
    journal.options_of(journal.live.state.jobs[job_id].spec)
    journal.commit(
        [
            Started(
                time_seconds=NOW, job_id=job_id, option=0, placement=((node, 1),),
                samples_per_second=1.0, productive_seconds=NOW + 5.0, reason="",
            )
        ]
    )  # fmt: skip


def expected(journal: Journal, job_id: str, policy: str = "fifo", **limits: float):
    present = copy_present(journal, STARTUP)
    assert present is not None
    return forecast_start(present, find_policy(policy), job_id, **limits)


def test_jobs_ahead_are_taken_into_account(make_journal):
    journal = make_journal()
    first, second, third = (submit(journal, seconds=length) for length in (100, 50, 30))
    start(journal, first)

    found = expected(journal, third)

    # 5 s to start and 100 s of the first, the same of the second.
    assert found.start_seconds == pytest.approx(NOW + 105 + 55)
    assert found.earlier == (second,)
    assert expected(journal, second).start_seconds == pytest.approx(NOW + 105)
    assert expected(journal, second).earlier == ()


def test_the_policy_of_the_controller_decides_who_is_first(make_journal):
    journal = make_journal()
    first, long, short = (submit(journal, seconds=length) for length in (100, 500, 30))
    start(journal, first)

    assert expected(journal, short, "shortest").start_seconds == NOW  # it preempts the first
    assert expected(journal, long, "shortest").earlier == (short,)


def test_a_free_gpu_means_now(make_journal):
    journal = make_journal(TWO_NODES)
    first, second = submit(journal, seconds=100), submit(journal, seconds=50)
    start(journal, first)

    assert expected(journal, second, "prices").start_seconds == NOW


def test_drained_nodes_do_not_count(make_journal):
    journal = make_journal(TWO_NODES)
    first, second = submit(journal, seconds=100), submit(journal, seconds=50)
    start(journal, first)
    free = journal.live.state.nodes[1].id
    journal.commit([Drained(time_seconds=NOW, node=free)])

    assert expected(journal, second).start_seconds == pytest.approx(NOW + 105)


def test_paused_jobs_stand_in_nobodys_way(make_journal):
    journal = make_journal()
    first, second, third = (submit(journal, seconds=length) for length in (100, 50, 30))
    start(journal, first)
    journal.commit([Paused(time_seconds=NOW, job_id=second, reason="")])

    assert expected(journal, third).start_seconds == pytest.approx(NOW + 105)


def test_a_job_that_backs_off_starts_when_it_may(make_journal):
    journal = make_journal()
    job = submit(journal, seconds=100)
    start(journal, job)
    journal.commit(
        [
            Interrupted(
                time_seconds=NOW, job_id=job, lost_samples=0.0, reason="crash", kind="crash",
                retry_seconds=NOW + 40.0,
            )
        ]
    )  # fmt: skip

    assert expected(journal, job).start_seconds == pytest.approx(NOW + 40)


def test_what_cannot_start_is_not_known(make_journal):
    journal = make_journal()
    job = submit(journal, seconds=100)
    journal.commit([Drained(time_seconds=NOW, node=journal.live.state.nodes[0].id)])

    found = expected(journal, job, "prices")

    assert (found.start_seconds, found.not_before_seconds) == (None, None)


def test_it_gives_up_in_time(make_journal):
    journal = make_journal()
    first, second = submit(journal, seconds=100), submit(journal, seconds=50)
    start(journal, first)

    found = expected(journal, second, most_cpu_seconds=-1.0)

    assert (found.start_seconds, found.not_before_seconds) == (None, NOW)


def test_looking_ahead_changes_nothing(make_journal):
    journal = make_journal()
    first, second = submit(journal, seconds=100), submit(journal, seconds=50)
    start(journal, first)
    before = journal.live.num_events

    expected(journal, second, "prices")

    state = journal.live.state
    assert (journal.live.num_events, state.free, state.num_running) == (before, [0], 1)
    assert state.jobs[first].state is JobState.RUNNING
    assert state.jobs[second].state is JobState.QUEUED


@pytest.mark.parametrize("policy", ["fifo", "prices"])
def test_a_hundred_jobs_take_few_rounds(make_journal, policy: str):
    journal = make_journal(TWO_NODES)
    jobs = [submit(journal, seconds=60 + one) for one in range(100)]
    start(journal, jobs[0])
    present, rounds = copy_present(journal, STARTUP), []
    decide = find_policy(policy)
    assert present is not None

    def counted(snapshot, memory):
        rounds.append(snapshot.now_seconds)
        return decide(snapshot, memory)

    found = forecast_start(present, counted, jobs[-1], most_cpu_seconds=60.0)

    assert found.start_seconds is not None
    assert len(rounds) <= 3 * len(jobs)  # what they cost: benchmarks/serving.py
