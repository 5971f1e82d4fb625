"""A controller that is killed and started again decides as one that was not."""

import dataclasses
import os
import time
from types import SimpleNamespace

import numpy as np
import pytest

from drystone.describe.cluster import NodeSpec
from drystone.describe.files.cluster import parse_cluster
from drystone.describe.files.job import make_job
from drystone.describe.job import JobSpec
from drystone.describe.market import Offer
from drystone.describe.option import OptionSet
from drystone.run.control.controller import Controller, ControllerSettings
from drystone.run.control.log_tools import LogTools
from drystone.run.control.notes import Remembered
from drystone.run.control.policy_memory import MemoryKeeper, dump_memory, load_memory
from drystone.run.control.store import Store
from drystone.run.engines.contract import Poll
from drystone.run.events import Started, render_event
from drystone.run.loop import drive
from drystone.run.simulate.faults import FaultSpec
from drystone.run.simulate.world import SimulatedWorld
from drystone.run.world import apply
from drystone.schedule.budget.policy import budget
from drystone.schedule.decision import Wake, find_policy
from drystone.schedule.prices.policy import PricesMemory, prices
from drystone.schedule.snapshot import StartupCost

NODES = [NodeSpec(id=f"{gpu}{row}", gpu=gpu, num_gpus=2) for gpu in "AT" for row in range(2)]
COUNTS = np.array([(1, 0), (2, 0), (4, 0), (0, 1), (0, 2), (2, 2)])
SPEEDS = np.array([1.0, 1.8, 3.0, 0.4, 0.7, 2.2])
FAULTS = FaultSpec(
    seed=3, node_losses_per_hour=4, repair_seconds=300, node_slowdowns_per_hour=4,
    slow_seconds=600, failed_start_share=0.1, checkpoint_seconds=60,
)  # fmt: skip
OFFERS = [Offer(name="more", gpu="A", num_gpus=2, price_dollars_per_hour=3.0, most_nodes=3)]
CLUSTER = parse_cluster("nodes: [{gpu: A100, gpus_per_node: 2}, {gpu: T4, gpus_per_node: 2}]")


def options_of(job: JobSpec) -> OptionSet:
    pace = 1.0 + int(job.id) % 3
    return OptionSet(
        counts=COUNTS, samples_per_second=pace * SPEEDS, memory_bytes=np.zeros(len(COUNTS))
    )


def make_world(**more) -> SimulatedWorld:
    jobs = [
        JobSpec(
            id=str(number), submit_seconds=60.0 * number, model=f"m{number % 2}", global_batch=4,
            total_samples=400.0 + 900.0 * (number % 5), owner=f"owner{number % 2}",
            max_duration_seconds=1500.0 if number % 4 == 0 else float("inf"),
        )
        for number in range(24)
    ]  # fmt: skip
    return SimulatedWorld(
        jobs=jobs, nodes=NODES, options_of=options_of, gpu_types=("A", "T"), faults=FAULTS,
        startup=StartupCost(seconds_per_gpu=5.0, most_seconds=20.0), **more,
    )  # fmt: skip


def through_text(policy):
    """The policy in a controller that is started anew before each of its decisions."""

    def decide(snapshot, text):
        decisions, after = policy(snapshot, load_memory(text) if text else None)
        return decisions, dump_memory(after)

    return decide


@pytest.mark.parametrize(
    "world",
    [
        {},
        {"knows_lengths": False},
        {"offers": OFFERS, "budget_dollars_per_hour": 2.0, "hard_cap_dollars_per_hour": 8.0},
    ],
    ids=["own", "unknown-lengths", "rented"],
)
def test_prices_decides_the_same_with_a_restart_before_every_decision(world):
    plain, restarted = make_world(**world), make_world(**world)
    drive(plain, prices)
    drive(restarted, through_text(prices))

    assert [*map(render_event, restarted.log)] == [*map(render_event, plain.log)]


def test_the_debt_of_a_budget_outlives_a_restart():
    market = {"offers": OFFERS, "budget_dollars_per_hour": 1.0, "hard_cap_dollars_per_hour": 9.0}
    owed = []

    def listened(snapshot, memory):
        decisions, after = budget(snapshot, memory)
        kept = load_memory(dump_memory(after))
        for name in ("balance", "level", "used", "began"):
            assert repr(getattr(kept, name)) == repr(getattr(after, name))
        owed.append(kept.balance.balance_dollars)
        return decisions, after

    drive(make_world(**market), listened)
    assert min(owed) < -0.1
    restarted = make_world(**market)
    drive(restarted, through_text(budget))  # it works with what is left of its memory
    assert restarted.is_over


class NoEngine:
    """Nodes on which nothing ever runs."""

    trouble = ""

    def start(self, controller) -> None: ...
    def close(self) -> None: ...

    def poll(self, offsets, renew, lease_seconds) -> Poll:
        return Poll((), frozenset())

    def ask(self, node, op, **values) -> dict:
        return {}

    def held(self) -> frozenset:
        return frozenset()


class Restarting:
    """A controller by a clock that is set, which can be killed between any two writes."""

    def __init__(self, folder, policy: str = "prices") -> None:
        self.now, self._folder, self._policy = 1000.0, folder, policy
        self.open()

    def open(self) -> None:
        self.controller = Controller(
            ControllerSettings(
                folder=self._folder, cluster=CLUSTER, engine=NoEngine(), policy=self._policy,
                clock=lambda: self.now,
            )
        )  # fmt: skip
        self.memory = self.controller._keeper.recall()
        policy = self.controller.admission.limited(find_policy(self._policy))
        self._decide = self.controller._noting(policy)

    def kill(self) -> None:
        self.controller.store.close()
        os.close(self.controller._lock)

    def submit(self, number: int) -> None:
        train = {"steps": 100 * number, "batch": 4}
        table = {"command": "true", "train": train, "gpus": {"max": 1 + number % 2}}
        self.controller.submit(make_job(table, folder=self._folder))

    def decide(self) -> list:
        self.snapshot = self.controller.journal.snapshot()
        decisions, self.memory = self._decide(self.snapshot, self.memory)
        return decisions

    def act(self, decisions: list) -> None:
        apply(decisions, self.controller.world, self.snapshot)

    def restart(self) -> None:
        self.kill()
        self.open()


def starts(folder, *, decides_twice=False, kills_before=False, kills_after=False) -> list:
    """What is started; killed `before` it acts, it decides once more, and `after` it has acted."""
    system = Restarting(folder)
    for number in range(1, 9):
        system.submit(number)
        decisions = system.decide()
        if kills_before:
            system.restart()
        if kills_before or decides_twice:
            system.now += 1.0
            decisions = system.decide()
        system.act(decisions)
        if kills_after:
            system.restart()
        system.now += 700.0
    found = [event for _, event in system.controller.store.read() if isinstance(event, Started)]
    system.kill()
    return found


@pytest.mark.parametrize("kills_after", [False, True])
@pytest.mark.parametrize("kills_before", [False, True])
def test_a_controller_that_is_killed_starts_the_same_jobs_on_the_same_nodes(
    tmp_path, kills_before, kills_after
):
    plain = starts(tmp_path / "plain", decides_twice=kills_before)
    assert len(plain) >= 3
    killed = starts(tmp_path / "killed", kills_before=kills_before, kills_after=kills_after)
    assert killed == plain


def test_what_is_remembered_counts_for_the_same_policy_on_the_same_types_only(tmp_path):
    system = Restarting(tmp_path)
    assert system.memory is None  # as in logs from before there was this
    system.submit(3)
    system.act(system.decide())
    journal, written = system.controller.journal, dump_memory(system.memory)
    assert isinstance(system.memory, PricesMemory)
    assert dump_memory(MemoryKeeper(journal, "prices").recall()) == written
    assert MemoryKeeper(journal, "budget").recall() is None
    journal.gpu_types = ("A100",)
    assert MemoryKeeper(journal, "prices").recall() is None
    system.kill()


@pytest.mark.parametrize(
    "text",
    [
        "", "[", "{}", '{"$": "os:system", "of": {"command": "false"}}',
        '{"$": "drystone.schedule.prices.policy:prices", "of": {"snapshot": 1, "memory": 2}}',
        '{"$": "drystone.schedule.prices.policy:PricesMemory", "of": {"colour": 1}}',
        '{"$": "drystone.schedule.gone:Memory", "of": {}}',
        '{"$": "array", "dtype": "object", "of": [1]}',
    ],
)  # fmt: skip
def test_what_another_version_wrote_is_left_alone(text):
    assert load_memory(text) is None


def test_it_is_written_when_something_was_decided_and_the_log_stays_small(tmp_path):
    system = Restarting(tmp_path)
    keeper, memory = system.controller._keeper, PricesMemory(prices=np.zeros(2))
    wakes = [Wake(at_seconds=0.0, reason="to look")]

    def is_written(decisions: list, large=memory) -> bool:
        notes = keeper.note(decisions, large)
        system.controller.journal.commit(notes)
        return bool(notes)

    acts = [SimpleNamespace()]
    assert is_written(wakes)
    system.now += 2.0
    assert not is_written(wakes)
    assert is_written(acts)
    system.now += 301.0
    assert is_written(
        wakes, dataclasses.replace(memory, usage=dict.fromkeys(map(str, range(9000)), 1.0))
    )
    system.now += 60.0
    assert not is_written(acts)  # it was large: not so often
    assert keeper.note(acts, {"1": 2}) == []  # of a policy that is not remembered
    system.kill()


def test_only_the_last_one_is_read_and_left_by_compaction(tmp_path):
    url = f"sqlite:///{tmp_path}/log.db"
    store = Store(url)
    lease = store.acquire("me", lease_seconds=60)
    notes = [
        Remembered(time_seconds=float(at), policy="p", setting="", memory="{}") for at in range(3)
    ]
    store.append(lease, notes)
    assert list(store.read_needed()) == [(3, notes[-1])]
    store.release(lease)
    store.close()
    tools = LogTools(url)
    assert tools.compact() == (3, 1)
    assert [event for _, event in tools.read()] == notes[-1:]
    tools.close()


def test_a_memory_that_makes_every_round_fail_is_given_up(tmp_path, monkeypatch):
    system = Restarting(tmp_path)
    system.submit(2)
    system.decide()
    system.restart()
    assert system.memory is not None
    had_memory = []

    def touchy(snapshot, memory):
        had_memory.append(memory is not None)
        if memory is not None:
            raise ZeroDivisionError
        system.controller.leave()
        return [], None

    home = "drystone.run.control.controller"
    monkeypatch.setattr(f"{home}.find_policy", lambda name: touchy)
    clock = SimpleNamespace(sleep=lambda seconds: None, monotonic=time.monotonic)
    monkeypatch.setattr(f"{home}.time", clock)
    system.controller.run()
    assert had_memory == [True, True, False]
    system.kill()
