"""Rounds of the reconciler against an engine that says what it is told to."""

import json
import shutil
from dataclasses import replace

import pytest

from drystone.describe.files.cluster import parse_cluster
from drystone.describe.files.job import make_job
from drystone.describe.job import JobSpec, TrainingJob, make_spec
from drystone.run.control import reconcile
from drystone.run.control.controller import Controller, ControllerSettings
from drystone.run.control.journal import Journal
from drystone.run.control.notes import Described
from drystone.run.control.reconcile import Reconciler
from drystone.run.control.runs import Patience
from drystone.run.control.store import Store, StoreBusy
from drystone.run.engines.agent.client import AgentGone
from drystone.run.engines.contract import Poll, Rendezvous, Seen
from drystone.run.events import Started, Stopped, Submitted
from drystone.run.lifecycle import JobState

CLUSTER = parse_cluster("nodes: [{gpu: A100, gpus_per_node: 2}, {gpu: T4, gpus_per_node: 2}]")
LOST = {"a100-0": "its power is off"}


class ToldEngine:
    """Says what the test put into `told`, and remembers what was asked of agents."""

    def __init__(self) -> None:
        self.told = Poll((), frozenset())
        self.asked: list[tuple[str, str, dict]] = []

    def poll(self, offsets, renew, lease_seconds) -> Poll:
        told, self.told = self.told, replace(self.told, cluster=None, left={})
        return told

    def ask(self, node, op, **values) -> dict:
        self.asked.append((node, op, values))
        return {}

    def last_asked(self, job_id: str) -> str:
        return [op for _, op, values in self.asked if values["job_id"] == job_id][-1]

    def rendezvous(self, node) -> Rendezvous:
        return Rendezvous(address="127.0.0.1", port=20_000)

    def reserve(self, key, gpus) -> bool:
        return True

    def held(self) -> frozenset:
        return frozenset()


@pytest.fixture
def engine():
    return ToldEngine()


@pytest.fixture
def journal(tmp_path):
    store = Store(f"sqlite:///{tmp_path}/log.db")
    made = Journal(store, store.acquire("me", lease_seconds=60), CLUSTER, clock=lambda: 100.0)
    yield made
    store.close()


@pytest.fixture
def reconciler(journal, engine, tmp_path):
    """Two jobs run, each on a node of its own."""
    for job_id, row in (("1", 0), ("2", 1)):
        journal.commit(submission(job_id))
        journal.commit([started(job_id, row)])
    made = Reconciler(journal, engine, tmp_path / "jobs", Patience())
    made.tick()
    assert [(node, op) for node, op, _ in engine.asked] == [
        ("a100-0", "launch"),
        ("t4-1", "launch"),
    ]
    return made


def submission(job_id: str) -> list:
    job = TrainingJob(name="a", command=("true",), num_steps=100, global_batch=4)
    spec = JobSpec(id=job_id, submit_seconds=100.0, model="a", total_samples=400.0, global_batch=4)
    return [
        Described(time_seconds=100.0, job_id=job_id, job=job),
        Submitted(time_seconds=100.0, job=spec),
    ]


def started(job_id: str, row: int) -> Started:
    return Started(
        time_seconds=100.0,
        job_id=job_id,
        option=0,
        placement=((row, 1),),
        samples_per_second=1.0,
        productive_seconds=100.0,
    )


def part(job_id: str, node: str, reports: str = "", **more) -> Seen:
    given = {"exits": {0: None}, "is_over": False, "note": "", "offset": len(reports)} | more
    return Seen(node=node, job_id=job_id, epoch=1, devices=(0,), reports=reports, **given)


def report(event: str, step: int) -> str:
    return json.dumps({"event": event, "step": step}) + "\n"


def states(journal) -> dict[str, JobState]:
    return {job_id: record.state for job_id, record in journal.live.state.jobs.items()}


@pytest.mark.parametrize("is_hopeless", [False, True])
def test_an_error_while_a_job_on_a_lost_node_is_ended_stays_that_jobs_own(
    journal, engine, reconciler, monkeypatch, is_hopeless
):
    ending_events = reconcile.ending_events

    def failing(journal, record, fault, progress):
        if is_hopeless or progress is not None:
            raise ZeroDivisionError("a mistake of ours")
        return ending_events(journal, record, fault, progress)

    monkeypatch.setattr(reconcile, "ending_events", failing)
    engine.told = Poll((part("2", "t4-1", report("started", 0)),), frozenset(), lost=LOST)
    reconciler.tick()

    assert "a mistake of ours" in reconciler.troubles.by_job["1"].text
    assert list(reconciler.troubles.by_job) == ["1"]
    assert reconciler.progress("2").step == 0  # the round went on
    # The node is lost only when nothing runs there any more.
    assert journal.live.state.lost == (set() if is_hopeless else {0})
    assert states(journal)["1"] is (JobState.RUNNING if is_hopeless else JobState.QUEUED)
    monkeypatch.undo()
    reconciler.tick()
    assert journal.live.state.lost == {0}
    assert states(journal) == {"1": JobState.QUEUED, "2": JobState.RUNNING}


def test_an_error_in_the_limit_of_one_job_stays_that_jobs_own(
    journal, engine, reconciler, monkeypatch
):
    limit_reached = reconcile.limit_reached

    def failing(journal, record):
        if record.spec.id == "1":
            raise KeyError("its price")
        return limit_reached(journal, record)

    monkeypatch.setattr(reconcile, "limit_reached", failing)
    engine.told = Poll((part("2", "t4-1", report("started", 0)),), frozenset())
    reconciler.tick()

    assert list(reconciler.troubles.by_job) == ["1"]
    assert reconciler.progress("2").step == 0


def test_nodes_that_left_are_told_once_and_not_forgotten_if_the_database_is_away(
    journal, engine, reconciler, monkeypatch
):
    def away(*_, **__):
        raise StoreBusy("the database is away")

    one_node = replace(CLUSTER, nodes=CLUSTER.nodes[:1])
    engine.told = Poll((), frozenset(), cluster=one_node, left={"t4-1": "it was sold"})
    with monkeypatch.context() as patched:
        patched.setattr(journal.store, "append", away)
        with pytest.raises(StoreBusy):
            reconciler.tick()
    assert not journal.live.state.gone
    reconciler.tick()

    assert journal.live.state.gone == {1}
    assert journal.live.jobs["2"].reason == "node-lost: t4-1 left the cluster: it was sold"


def test_a_job_that_is_stopped_is_as_far_as_the_last_checkpoint_it_ever_reported(
    journal, engine, reconciler
):
    """Not as far as the first step that is reported after it was stopped."""
    reports = report("started", 0) + report("step", 7) + report("checkpoint", 5)
    engine.told = Poll((part("1", "a100-0", reports),), frozenset())
    reconciler.tick()
    journal.commit([Stopped(time_seconds=100.0, job_id="1")])
    engine.told = Poll((part("1", "a100-0", report("step", 8)),), frozenset())
    reconciler.tick()
    assert engine.last_asked("1") == "stop"
    over = part("1", "a100-0", is_over=True, exits={0: -15})
    engine.told = Poll((over,), frozenset())
    reconciler.tick()

    assert engine.last_asked("1") == "forget"
    assert journal.live.state.jobs["1"].done_samples == 5 * 4


def test_an_agent_that_does_not_answer_is_asked_again(journal, engine, reconciler, monkeypatch):
    def gone(*_, **__):
        raise AgentGone("nobody is there")

    with monkeypatch.context() as patched:
        patched.setattr(engine, "ask", gone)
        reconciler.tick()
    engine.asked.clear()
    reconciler.tick()

    assert [op for _, op, _ in engine.asked] == ["launch", "launch"]
    assert not reconciler.troubles.by_job


CONFIG = {
    "architectures": ["LlamaForCausalLM"], "model_type": "llama", "hidden_size": 64,
    "intermediate_size": 128, "num_hidden_layers": 2, "num_attention_heads": 4,
    "num_key_value_heads": 4, "vocab_size": 256, "max_position_embeddings": 64,
}  # fmt: skip


def put_model_job(journal, folder, job_id: str) -> None:
    table = {"model": str(folder), "train": {"steps": 10, "batch": 4, "sequence": 64}}
    job = make_job(table | {"gpus": {"max": 1}}, folder=folder.parent)
    at = journal.now()
    spec = make_spec(job, journal.book.shape(job), job_id=job_id, submit_seconds=at)
    journal.commit(
        [Described(time_seconds=at, job_id=job_id, job=job), Submitted(time_seconds=at, job=spec)]
    )


def test_jobs_whose_model_is_gone_after_a_restart_keep_nobody_from_starting(
    journal, engine, tmp_path
):
    model, hidden = tmp_path / "model", tmp_path / "hidden"
    model.mkdir()
    (model / "config.json").write_text(json.dumps(CONFIG))
    put_model_job(journal, model, "1")
    journal.snapshot()
    journal.commit([started("1", 0)])
    put_model_job(journal, model, "2")
    journal.commit(submission("3"))
    shutil.move(model, hidden)

    grown = replace(CLUSTER, nodes=(*CLUSTER.nodes, replace(CLUSTER.nodes[0], id="a100-9")))
    later = Journal(journal.store, journal.lease, grown, clock=lambda: 100.0)
    reconciler = Reconciler(later, engine, tmp_path / "jobs", Patience())
    seen = later.snapshot()
    assert [spec.id for spec in seen.jobs.specs] == ["1", "3"]  # what runs stays, "2" is held back
    assert set(reconciler.troubles.by_job) == {"1", "2"}
    assert "config.json" in reconciler.troubles.by_job["2"].text
    reconciler.tick()  # no order was written before the restart: it goes back to the queue
    assert states(later) == {"1": JobState.QUEUED, "2": JobState.QUEUED, "3": JobState.QUEUED}
    assert [spec.id for spec in later.snapshot().jobs.specs] == ["3"]

    shutil.move(hidden, model)
    later.unplannable._clock = lambda: float("inf")  # the time to try again has come
    assert [spec.id for spec in later.snapshot().jobs.specs] == ["1", "2", "3"]
    assert not reconciler.troubles.by_job


def test_a_running_job_whose_model_is_gone_is_followed_to_its_end(journal, engine, tmp_path):
    model = tmp_path / "model"
    model.mkdir()
    (model / "config.json").write_text(json.dumps(CONFIG))
    put_model_job(journal, model, "1")
    journal.snapshot()
    journal.commit([started("1", 0)])
    Reconciler(journal, engine, tmp_path / "jobs", Patience()).tick()
    shutil.rmtree(model)

    later = Journal(journal.store, journal.lease, CLUSTER, clock=lambda: 100.0)
    reconciler = Reconciler(later, engine, tmp_path / "jobs", Patience())
    later.snapshot()
    reports = report("started", 0) + "".join(report("step", n) for n in range(1, 11))
    over = part("1", "a100-0", reports + report("finished", 10), is_over=True, exits={0: 0})
    engine.told = Poll((over,), frozenset())
    reconciler.tick()

    assert states(later) == {"1": JobState.DONE}
    assert not later.unplannable.by_job


def test_a_controller_starts_though_the_model_of_a_job_is_gone(tmp_path):
    model = tmp_path / "model"
    model.mkdir()
    (model / "config.json").write_text(json.dumps(CONFIG))
    settings = ControllerSettings(folder=tmp_path / "s", cluster=CLUSTER)
    first = Controller(settings)
    put_model_job(first.journal, model, "1")
    first.close()
    shutil.rmtree(model)
    second = Controller(settings)
    try:
        assert len(second.world.observe().jobs.specs) == 0
        assert "config.json" in second.reconciler.troubles.by_job["1"].text
    finally:
        second.close()


def test_curves_of_jobs_that_ended_are_dropped_and_what_lists_show_is_kept(
    journal, engine, tmp_path, monkeypatch
):
    monkeypatch.setattr(reconcile, "_MAX_CURVES", 3)
    made = Reconciler(journal, engine, tmp_path / "jobs", Patience())
    step = json.dumps({"event": "step", "step": 1, "loss": 0.5}) + "\n"
    for number in range(1, 9):
        job_id = str(number)
        journal.commit([*submission(job_id), started(job_id, 0)])
        engine.told = Poll((), frozenset())
        made.tick()
        reports = report("started", 0) + step + report("finished", 100)
        over = part(job_id, "a100-0", reports, is_over=True, exits={0: 0})
        engine.told = Poll((over,), frozenset())
        made.tick()
        engine.told = Poll((replace(over, reports=""),), frozenset())
        made.tick()
    curves = [made.progress(str(number)).curve for number in range(1, 9)]
    assert [len(curve) for curve in curves] == [0, 0, 0, 0, 0, 1, 1, 1]
    assert [made.progress(str(number)).loss for number in range(1, 9)] == [0.5] * 8
    assert not made.progress("1").has_curve
