"""Renting for real, from a simulated cloud: real processes on nodes that come and go."""

import json
import os
import subprocess
import sys
import time
from collections import Counter
from pathlib import Path

import pytest
from renters import HARD_CAP, MARKET, check_rentals, is_quiet, open_cloud, renting, take_back
from systems import TRAINER

from drystone.describe.files.market import parse_market
from drystone.run.control.store import Store
from drystone.run.events import NodeJoined, NodeReclaimed, RentalAsked
from drystone.run.renting.commands import CommandProvider
from drystone.run.renting.provider import Stage, live_offers
from drystone.service.money import LedgerPage

HERE = Path(__file__).parent
NUM_KILLS = int(os.environ.get("DRYSTONE_NUM_KILLS", "3"))
FIRST_SEED = int(os.environ.get("DRYSTONE_FIRST_SEED", "1"))


@pytest.mark.slow
@pytest.mark.parametrize("policy", ["budget", "prices"])
def test_jobs_run_on_rented_nodes_and_everything_is_given_back_and_paid(tmp_path, policy):
    cloud = open_cloud(tmp_path)
    with renting(tmp_path / "s", cloud, policy) as system:
        jobs = [system.submit(owner="ada") for _ in range(4)]
        assert system.wait_over(*jobs) == ["done"] * 4
        system.until(lambda: is_quiet(system.controller))
        events = system.events()
        now = system.controller.journal.now()
        accounts = system.live.ledger.statement(now).by_account
        spent = {account.job_id: amount for account, amount in accounts.items()}
        shown = LedgerPage.of(system.controller, now, 100)
    check_rentals(events, cloud)
    assert set(spent) - {""} == set(jobs)
    assert {one.team for one in shown.accounts if one.job_id} == {"ada"}
    assert sum(one.dollars for one in shown.accounts) == pytest.approx(shown.total_dollars)
    assert sum(one.dollars for one in shown.nodes) == pytest.approx(shown.total_dollars)
    assert shown.hard_cap_dollars_per_hour == HARD_CAP
    assert 1 <= sum(one.num_nodes for one in events if isinstance(one, RentalAsked)) <= 6


@pytest.mark.slow
def test_a_hard_cap_below_the_favourite_option_lets_jobs_run_on_fewer_nodes(tmp_path):
    """Four nodes would be fastest, and the cap pays for three: $1.30 at $0.40 each."""
    cloud = open_cloud(tmp_path)
    with renting(tmp_path / "s", cloud) as system:
        jobs = [system.submit(gpus={"max": 4}) for _ in range(3)]
        assert system.wait_over(*jobs, seconds=120) == ["done"] * 3
        system.until(lambda: is_quiet(system.controller))
        events = system.events()
    check_rentals(events, cloud)


@pytest.mark.slow
def test_a_node_that_is_taken_back_costs_a_checkpoint_at_most(tmp_path):
    cloud = open_cloud(tmp_path)
    with renting(tmp_path / "s", cloud) as system:
        job = system.submit(steps=60, seconds=0.05)
        for step in (12, 30):
            system.wait_step(job, step)
            take_back(cloud)
        assert system.wait_over(job, seconds=120) == ["done"]
        system.until(lambda: is_quiet(system.controller))
        events = system.events()
    check_rentals(events, cloud)
    assert sum(isinstance(one, NodeReclaimed) for one in events) == 2
    steps = [line.split()[2] for line in system.audit(job) if " step " in line]
    assert sorted(set(map(int, steps))) == list(range(1, 61))


@pytest.mark.slow
def test_the_next_controller_finds_rented_nodes_and_ends_what_nobody_rented(tmp_path):
    cloud = open_cloud(tmp_path)
    with renting(tmp_path / "s", cloud) as system:
        job = system.submit(steps=100_000, seconds=0.05)
        system.wait_step(job, 2)
        family = system.controller.desk._family
        cloud.rent(f"{family}-dead-000000", cloud._offers["t4"])  # of a log that was lost
        system.until(lambda: cloud.status(f"{family}-dead")[0].stage is Stage.ENDED)
        [token] = [one.token for one in cloud.status(family) if one.stage is Stage.RUNNING]
        controller = system.controller
        controller.close, closes = lambda **_: None, controller.close
    closes(ends_agents=False)  # as if it had been ended: agents and nodes stay
    again = open_cloud(tmp_path)
    again.rent(f"{family}-gone-000001", again._offers["t4"])
    with renting(tmp_path / "s", again) as system:
        system.until(lambda: again.status(f"{family}-gone")[0].stage is Stage.ENDED)
        system.wait_step(job, 3)
        assert len([one for one in system.events() if isinstance(one, NodeJoined)]) == 1
        assert not [line for line in system.audit(job) if line.startswith("2 ")]  # adopted
        system.controller.cancel(job)
        system.until(lambda: is_quiet(system.controller))
        assert [one.token for one in again.status(token)] == [token]
    assert not [one for one in again.status(family) if one.stage is Stage.RUNNING]


@pytest.mark.slow
def test_a_controller_killed_around_a_rental_neither_loses_nor_doubles_a_node(tmp_path):
    (tmp_path / "market.yaml").write_text(MARKET)
    jobs = [
        {
            "command": f"python {TRAINER}",
            "train": {"steps": 20, "batch": 4},
            "gpus": {"max": 1},
            "environment": {"STEP_SECONDS": "0.03"},
        }
        for _ in range(4 + NUM_KILLS)
    ]
    (tmp_path / "wanted.json").write_text(json.dumps(jobs))
    causes = Counter()
    for seed in (*range(FIRST_SEED, FIRST_SEED + NUM_KILLS), 0):
        ended = subprocess.run(
            [sys.executable, str(HERE / "deadly_renter.py"), str(tmp_path), str(seed)],
            capture_output=True, text=True, timeout=300, check=False,
        )  # fmt: skip
        assert ended.returncode in ((-9, 0) if seed else (0,)), ended.stderr[-3000:]
        causes[ended.stdout.strip() or "lived"] += 1
    assert causes["lived"] <= 2, causes
    (tmp_path / "causes.json").write_text(json.dumps(causes))
    store = Store(f"sqlite:///{tmp_path / 's' / 'log.db'}")
    events, rows = [event for _, event in store.read()], store.list_jobs()
    store.close()
    assert [row.state for row in rows] == ["done"] * len(jobs)
    cloud = open_cloud(tmp_path, seed=7, stockout_share=0.1, spell_seconds=5.0)
    check_rentals(events, cloud)
    asked = sum(one.num_nodes for one in events if isinstance(one, RentalAsked))
    assert len(cloud.status("drystone-")) == asked  # each once, and none besides
    joined = [one.rental for one in events if isinstance(one, NodeJoined)]
    assert len(joined) == len(set(joined))
    for row in rows:
        audit = (tmp_path / "s" / "jobs" / row.id / "checkpoints" / "audit").read_text()
        assert "twice" not in audit


class Forgetful:
    """A cloud whose list is empty now and then, and that does not end a node when it is told to."""

    def __init__(self, cloud) -> None:
        self._cloud, self._offers, self.rates = cloud, cloud._offers, [0.0]
        self.keeps: set[str] = set()

    def __getattr__(self, name):
        return getattr(self._cloud, name)

    def release(self, token: str) -> None:
        if token in self.keeps:
            raise RuntimeError("boom on terminate")
        self._cloud.release(token)

    def status(self, fleet: str) -> list:
        found = self._cloud.status(fleet)
        live = [rental for rental in found if rental.stage in (Stage.STARTING, Stage.RUNNING)]
        self.rates.append(sum(0.4 for _ in live))
        is_blind = int(time.monotonic() * 2) % 4 == 0  # half a second in every two
        return [] if is_blind else found


@pytest.mark.slow
def test_a_list_that_is_empty_and_a_node_that_stays_rent_nothing_above_the_cap(tmp_path):
    cloud = Forgetful(open_cloud(tmp_path))
    with renting(tmp_path / "s", cloud) as system:
        jobs = [system.submit(steps=60, seconds=0.05) for _ in range(4)]
        system.until(lambda: system.live.state.rentals.rented)
        cloud.keeps = {cloud._cloud.status("drystone")[0].token}
        assert system.wait_over(*jobs, seconds=120) == ["done"] * 4
        assert all(system.controller.find(job).num_starts == 1 for job in jobs)
        more = system.submit(steps=10)
        assert system.wait_over(more, seconds=60) == ["done"]
        cloud.keeps = set()
        system.until(lambda: is_quiet(system.controller), seconds=60)
    assert max(cloud.rates) <= HARD_CAP


@pytest.mark.slow
def test_three_programs_that_fail_a_fifth_of_the_time_lose_and_double_nothing(tmp_path):
    """The provider `commands`, with real processes: two controllers, one after the other."""
    folder = tmp_path / "cloud"
    (folder / "nodes").mkdir(parents=True)
    (folder / "faults").write_text("0.2")
    source = (HERE / "command_cloud.py").read_text()
    for name in ("create", "list", "delete"):
        (folder / name).write_text(f"#!{sys.executable} -S\n{source}")
        (folder / name).chmod(0o755)
    offers = live_offers(parse_market(MARKET), is_simulated=True)
    with renting(tmp_path / "s", CommandProvider(folder, offers)) as system:
        first = [system.submit() for _ in range(2)]
        assert system.wait_over(*first, seconds=180) == ["done"] * 2
    with renting(tmp_path / "s", CommandProvider(folder, offers)) as system:
        second = [system.submit() for _ in range(2)]
        assert system.wait_over(*second, seconds=180) == ["done"] * 2
        system.until(lambda: is_quiet(system.controller), seconds=120)
        events = system.events()
    (folder / "faults").write_text("0")
    check_rentals(events, CommandProvider(folder, offers))
    assert not (folder / "doubles").exists()
