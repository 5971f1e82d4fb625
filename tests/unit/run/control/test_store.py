import dataclasses
import json
import sqlite3
import subprocess
import sys
from pathlib import Path

import pytest

from drystone.describe.job import JobSpec, TrainConfig, TrainingJob
from drystone.errors import RequestError
from drystone.run.control.notes import NOTES, Decided, Described, Drained, Launched, parse, render
from drystone.run.control.store import JobRow, LeaseLost, Store, StoreBusy
from drystone.run.events import Cancelled, Submitted

DATA = Path(__file__).parents[3] / "data"
JOB = TrainingJob(name="a", model="mini-gpt", num_steps=5, environment=(("A", "1"),))


def spec(job_id: str) -> JobSpec:
    return JobSpec(id=job_id, submit_seconds=1.0, model="mini-gpt", total_samples=5)


def submitted(job_id: str, key: str = "") -> list:
    return [
        Described(time_seconds=1.0, job_id=job_id, job=JOB, client_key=key),
        Submitted(time_seconds=1.0, job=spec(job_id)),
    ]


def row(job_id: str, state: str = "queued", at: float = 1.0) -> JobRow:
    return JobRow(
        id=job_id,
        name="a",
        owner="ada",
        state=state,
        submit_seconds=at,
        end_seconds=None,
        reason="",
    )


@pytest.fixture(params=["sqlite", pytest.param("postgres", marks=pytest.mark.slow)])
def url(request, tmp_path):
    if request.param == "sqlite":
        return f"sqlite:///{tmp_path}/log.db"
    return request.getfixturevalue("postgres")()


@pytest.fixture
def store(url):
    made = Store(url)
    yield made
    made.close()


def test_descriptions_of_jobs_in_older_logs_are_read_back():
    lines = (DATA / "described_flat.jsonl").read_text(encoding="utf-8").splitlines()

    full, script = (parse(line) for line in lines)

    assert full.job.train == TrainConfig(
        learning_rate=1e-3, weight_decay=0.25, clip=2.5, seed=7, checkpoint_every=40
    )
    assert (full.client_key, full.job.num_epochs, full.job.max_gpus) == ("k", 1.5, 4)
    assert full.job.environment == (("A", "1"),)
    assert script.job.train == TrainConfig()
    assert (script.job.team, script.job.command) == ("vision", ("python", "train.py", "--fast"))
    for note in (full, script):
        assert parse(render(note)) == note
        assert json.loads(render(note))["job"]["train"] == dataclasses.asdict(note.job.train)


def test_what_is_appended_is_read_back_in_order(store):
    lease = store.acquire("one", lease_seconds=60)
    events = [*submitted("a"), *submitted("b"), Cancelled(time_seconds=2.0, job_id="a")]

    assert store.append(lease, events[:2]) == 2
    assert store.append(lease, events[2:]) == 5

    assert [event for _, event in store.read()] == events
    assert [sequence for sequence, _ in store.read(after=2)] == [3, 4, 5]
    assert [type(one).__name__ for _, one in store.read(job_id="a")] == [
        "Described", "Submitted", "Cancelled",
    ]  # fmt: skip
    assert store.last_sequence() == 5


def test_of_two_controllers_one_acts(store, url):
    first = store.acquire("one", lease_seconds=60)
    other = Store(url)

    assert other.acquire("two", lease_seconds=60) is None
    store.append(first, submitted("a"))
    store.release(first)
    second = other.acquire("two", lease_seconds=60)
    assert second.epoch == first.epoch + 1
    with pytest.raises(LeaseLost, match="two"):
        store.append(first, submitted("b"), [row("b")])
    with pytest.raises(LeaseLost):
        store.renew(first, lease_seconds=60)

    assert store.last_sequence() == 2
    assert store.list_jobs() == []
    other.close()


def test_a_lease_that_ran_out_can_be_taken(store):
    assert store.acquire("one", lease_seconds=-1.0)
    assert store.acquire("two", lease_seconds=60)
    assert store.acquire("one", lease_seconds=60) is None


def test_a_key_is_used_once(store):
    lease = store.acquire("one", lease_seconds=60)
    store.append(lease, submitted("a", key="k"))

    assert store.find_key("k") == "a"
    assert store.find_key("other") is None
    with pytest.raises(LeaseLost):
        store.append(lease, submitted("b", key="k"))
    assert store.last_sequence() == 2


def test_the_table_of_jobs_follows(store):
    lease = store.acquire("one", lease_seconds=60)
    store.append(lease, [], [row("b", at=2.0), row("a")])
    store.append(lease, [], [row("a", "done")])

    assert [(one.id, one.state) for one in store.list_jobs()] == [("a", "done"), ("b", "queued")]
    assert [one.id for one in store.list_jobs(states=["queued"])] == ["b"]
    assert [one.id for one in store.list_jobs(most=1, skip=1)] == ["b"]


def test_a_locked_database_is_said_and_nothing_is_written(tmp_path):
    store = Store(f"sqlite:///{tmp_path}/log.db", busy_seconds=0.05)
    lease = store.acquire("one", lease_seconds=60)
    blocker = sqlite3.connect(tmp_path / "log.db", isolation_level=None)
    blocker.execute("BEGIN IMMEDIATE")

    with pytest.raises(StoreBusy, match="locked"):
        store.append(lease, submitted("a"))
    assert store.last_sequence() == 0  # reading goes on
    blocker.execute("ROLLBACK")
    blocker.close()
    assert store.append(lease, submitted("a")) == 2
    store.close()


def test_an_unknown_database_is_refused():
    for url in ("nonsense", "sqlite:////no/such/folder/log.db", "foo://x"):
        with pytest.raises(RequestError):
            Store(url)


@pytest.mark.slow
def test_a_writer_that_is_killed_leaves_whole_transactions(tmp_path):
    code = """
import sys
from test_store import *
store = Store(sys.argv[1])
lease = store.acquire("one", lease_seconds=60)
for number in range(100000):
    store.append(lease, submitted(f"j{number}"), [row(f"j{number}")])
    print(number, flush=True)
"""
    url = f"sqlite:///{tmp_path}/log.db"
    for kill_after in (3, 8, 20):
        writer = subprocess.Popen(
            [sys.executable, "-c", code, url], stdout=subprocess.PIPE, text=True,
            cwd=Path(__file__).parent,
        )  # fmt: skip
        told = [int(writer.stdout.readline()) for _ in range(kill_after)]
        writer.kill()
        writer.communicate()
        store = Store(url)
        jobs = {one.job.id for _, one in store.read() if isinstance(one, Submitted)}
        assert len(jobs) > told[-1]
        assert jobs == {one.id for one in store.list_jobs()}
        assert store.last_sequence() == 2 * len(jobs)
        store.close()
        for name in ("log.db", "log.db-wal", "log.db-shm"):
            (tmp_path / name).unlink(missing_ok=True)


def test_ten_thousand_jobs_are_listed_by_one_query(store):
    lease = store.acquire("one", lease_seconds=60)
    store.append(lease, [], [row(f"j{number:05d}") for number in range(10_000)])

    assert len(store.list_jobs()) == 10_000
    assert len(store.list_jobs(states=["queued"], most=100, skip=9_950)) == 50


NOTE_CASES = [
    Described(time_seconds=1.0, job_id="a", job=JOB),
    Drained(time_seconds=1.0, node="n"),
    Launched(time_seconds=1.0, job_id="a", epoch=2, plan="2 T4", devices=(("n", 0), ("n", 1))),
    Decided(time_seconds=1.0, job_id="a", decision="Start", reason="r", numbers={"price": 0.5}),
]


@pytest.mark.parametrize("note", NOTE_CASES, ids=lambda one: type(one).__name__)
def test_a_note_reads_back_as_it_was(note):
    assert parse(render(note)) == note
    assert type(note).__name__ in NOTES
