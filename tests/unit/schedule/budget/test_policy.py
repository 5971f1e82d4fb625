"""The budget policy: on single snapshots, and in a small rental market in virtual time."""

from __future__ import annotations

from dataclasses import replace

import numpy as np
import pytest

from drystone.describe.job import JobSpec
from drystone.describe.market import Offer
from drystone.describe.option import OptionSet
from drystone.run.simulate.world import SimulatedWorld
from drystone.run.world import apply
from drystone.schedule.budget.acting import KEEP_SECONDS
from drystone.schedule.budget.arrivals import believed_classes, first_arrivals
from drystone.schedule.budget.frontier import classes_from_speeds, trace_frontier
from drystone.schedule.budget.multiplier import BudgetBalance
from drystone.schedule.budget.nodes import Wanted, rent_and_release
from drystone.schedule.budget.policy import HORIZON_ARRIVALS, BudgetMemory, budget
from drystone.schedule.check import check_decisions
from drystone.schedule.decision import Refuse, Release, Rent, Resize, Start
from drystone.schedule.packing import make_room
from drystone.schedule.snapshot import StartupCost

HOUR = 3600.0
GPUS = np.array([1, 2, 4, 8, 16], dtype=np.int64)


def options(*speeds: float, kinds: int = 1, kind: int = 0) -> OptionSet:
    """The first widths of one GPU type, at these speeds."""
    counts = np.zeros((len(speeds), kinds), dtype=np.int64)
    counts[:, kind] = GPUS[: len(speeds)]
    return OptionSet(
        counts=counts,
        samples_per_second=np.array(speeds),
        memory_bytes=np.zeros(len(speeds)),
    )


def joined(*sets: OptionSet) -> OptionSet:
    return OptionSet(
        counts=np.concatenate([one.counts for one in sets]),
        samples_per_second=np.concatenate([one.samples_per_second for one in sets]),
        memory_bytes=np.concatenate([one.memory_bytes for one in sets]),
    )


class MarketWorld(SimulatedWorld):
    """The simulator with a few nodes of the owner's, if any, and offers; options by model."""

    def __init__(
        self,
        jobs: list[JobSpec],
        options_of: dict[str, OptionSet],
        offers: tuple[Offer, ...],
        limit: float,
        *,
        num_own: int = 0,
        **settings,
    ) -> None:
        self.num_own, self.last_submit = num_own, max(job.submit_seconds for job in jobs)
        self.spent_by_last_arrival = 0.0
        super().__init__(
            jobs=jobs,
            nodes=[offers[0].node(f"own-{row}") for row in range(num_own)],
            options_of=lambda job: options_of[job.model],
            gpu_types=tuple(sorted({one.gpu for one in offers})),
            offers=offers,
            budget_dollars_per_hour=limit,
            **settings,
        )

    @property
    def rate(self) -> float:
        return self.state.rentals.dollars_per_hour()

    def run(self) -> list[tuple[float, object]]:
        """Until nothing comes any more; every decision, with its time."""
        memory, made = None, []
        while not self.is_over:
            snapshot = self.observe()
            if snapshot.now_seconds <= self.last_submit:
                self.spent_by_last_arrival = snapshot.spent_dollars
            decisions, memory = budget(snapshot, memory)
            assert check_decisions(snapshot, decisions) == []
            made.extend((self.now_seconds, decision) for decision in decisions)
            apply(decisions, self, snapshot)
            assert len(made) < 200_000
            self.advance()
        return made

    def has_ended(self) -> bool:
        return all(not np.isnan(job.end_seconds) for job in self.state.jobs.values())

    def mean_completion_seconds(self) -> float:
        jobs = self.state.jobs.values()
        return float(np.mean([job.end_seconds - job.spec.submit_seconds for job in jobs]))


def stream(rates: dict[str, float], mean_samples: float, number: int, seed: int) -> list[JobSpec]:
    """Poisson arrivals of several models, exponential sizes."""
    generator = np.random.default_rng(seed)
    names, total = list(rates), sum(rates.values())
    times = np.cumsum(generator.exponential(1 / total, number))
    models = generator.choice(names, number, p=[rates[name] / total for name in names])
    sizes = generator.exponential(mean_samples, number)
    return [
        JobSpec(id=f"j{n}", submit_seconds=float(t), model=str(m), total_samples=float(x) + 1e-3)
        for n, (t, m, x) in enumerate(zip(times, models, sizes, strict=True))
    ]


# Single decisions


def market_snapshot(jobs: list[JobSpec], limit: float, offers=None, **fields) -> MarketWorld:
    offers = offers or (Offer(name="a", gpu="A", num_gpus=4, price_dollars_per_hour=4.0),)
    table = {"m": options(1.0, 1.9, 3.5, 6.0)}
    return MarketWorld(jobs, table, offers, limit, **fields)


def one_job(**fields) -> JobSpec:
    return JobSpec(
        **{"id": "j", "submit_seconds": 0.0, "model": "m", "total_samples": 7200.0, **fields}
    )


def test_a_job_without_room_makes_the_policy_rent_and_start_it_when_the_nodes_come():
    world = market_snapshot([one_job()], 1000.0)
    snapshot = world.observe()
    decisions, memory = budget(snapshot, None)

    # Money is plenty: the fastest option, eight GPUs, is two nodes.
    assert [type(one) for one in decisions] == [Rent]
    assert (decisions[0].offer, decisions[0].num_nodes) == ("a", 2)

    apply(decisions, world, snapshot)
    again, memory = budget(world.observe(), memory)
    assert again == []  # they are on their way
    world.advance()
    started, memory = budget(world.observe(), memory)
    assert [type(one) for one in started] == [Start]
    assert started[0].option == 3
    assert "times as fast as" in started[0].reason
    assert started[0].numbers["job_hours_per_dollar"] >= 0


def test_idle_rented_nodes_are_given_back_and_own_ones_are_kept():
    world = market_snapshot([one_job()], 1000.0, num_own=1)
    made = world.run()

    released = [one for _, one in made if isinstance(one, Release)]
    assert released
    assert all(one.node >= world.num_own for one in released)
    assert world.rate == 0
    assert world.has_ended()


def test_nodes_that_come_one_by_one_are_kept_for_the_job_that_waits_for_all_of_them():
    world = market_snapshot([one_job()], 1000.0)
    world.rent("a", 1, "the first of two")
    world.advance()
    world.rent("a", 1, "the second")
    decisions, memory = budget(world.observe(), None)

    assert decisions == []
    world.advance()
    started, _ = budget(world.observe(), memory)
    assert [(type(one), one.placement) for one in started] == [(Start, ((0, 4), (1, 4)))]


def test_a_later_job_does_not_take_the_node_that_an_earlier_one_waits_with():
    world = market_snapshot([one_job(), one_job(id="k", max_gpus=1)], 1000.0)
    world.rent("a", 1, "the first of two")
    world.advance()
    decisions, _ = budget(world.observe(), None)

    assert [(type(one), one.num_nodes) for one in decisions] == [(Rent, 2)]


def test_nodes_of_another_offer_that_are_on_their_way_are_not_rented_twice():
    alike = [Offer(name=name, gpu="A", num_gpus=4, price_dollars_per_hour=4.0) for name in "ab"]
    world = market_snapshot([one_job()], 1000.0, offers=tuple(alike))
    world.rent("b", 2, "the other offer was short")
    decisions, _ = budget(world.observe(), None)

    assert decisions == []


@pytest.mark.parametrize(
    ("limit", "owed_dollars", "num_nodes"), [(100.0, 0.0, 48), (100.0, 240.0, 24), (200.0, 0.0, 48)]
)
def test_a_tight_budget_takes_cheaper_options_once_much_is_owed(limit, owed_dollars, num_nodes):
    """On one node each they cost less than on two."""
    jobs = [one_job(id=f"j{number}") for number in range(24)]
    snapshot = market_snapshot(jobs, limit).observe()
    balance = BudgetBalance(
        budget_dollars_per_hour=limit, horizon_seconds=HOUR, balance_dollars=-owed_dollars
    )
    before = BudgetMemory(arrivals=first_arrivals(0.0), time_seconds=0.0, balance=balance)

    decisions, _ = budget(snapshot, before)

    rents = [one for one in decisions if isinstance(one, Rent)]
    assert [(one.offer, one.num_nodes) for one in rents] == [("a", num_nodes)]


def test_the_hard_cap_is_kept():
    world = market_snapshot([one_job(), one_job(id="k")], 1000.0, hard_cap_dollars_per_hour=13.0)
    decisions, _ = budget(world.observe(), None)

    # Two nodes for each would be faster and more than the cap, and leave the second job waiting.
    assert [(one.offer, one.num_nodes) for one in decisions] == [("a", 2)]
    assert check_decisions(world.observe(), decisions) == []


# Nodes of 4 GPUs at $4 an hour: the options are one node (1, 2 or 4 GPUs) and two (8, the fastest).
@pytest.mark.parametrize(
    ("cap", "most_nodes_rented", "dollars"), [(7.0, 1, 6.86), (8.0, 2, 8.0), (13.0, 3, 8.0)]
)
def test_a_cap_below_the_favourite_option_makes_jobs_take_another(cap, most_nodes_rented, dollars):
    jobs = [one_job(id=f"j{n}", submit_seconds=60.0 * n) for n in range(3)]
    world = market_snapshot(jobs, 1000.0, hard_cap_dollars_per_hour=cap)
    made = world.run()

    assert [job.state.value for job in world.state.jobs.values()] == ["done"] * 3
    assert max(one.num_nodes for _, one in made if isinstance(one, Rent)) <= most_nodes_rented
    assert world.spent_dollars <= dollars * 1.01  # nothing is paid that no job used
    assert not world.state.rentals.rented


def test_nothing_is_rented_for_a_job_that_only_fits_above_the_cap():
    world = market_snapshot([one_job(min_gpus=8)], 1000.0, hard_cap_dollars_per_hour=7.0)
    made = world.run()

    assert not [one for _, one in made if isinstance(one, Rent | Refuse)]  # prices may fall
    assert world.spent_dollars == 0


def test_an_own_node_counts_towards_what_the_cap_leaves_out():
    """Two nodes are $8 under a cap of 7; where one is the owner's, the other is rented for $4."""
    world = market_snapshot([one_job(min_gpus=8)], 1000.0, num_own=1, hard_cap_dollars_per_hour=7.0)
    made = world.run()

    assert world.has_ended()
    assert [one.num_nodes for _, one in made if isinstance(one, Rent)] == [1]


def test_idle_nodes_that_no_waiting_job_can_use_make_way_under_the_cap():
    offers = (
        Offer(name="a", gpu="A", num_gpus=1, price_dollars_per_hour=2.0),
        Offer(name="b", gpu="B", num_gpus=1, price_dollars_per_hour=3.0),
    )
    table = {"m": options(1.0, 1.9, kinds=2, kind=1)}  # on B alone
    job = one_job(min_gpus=2)
    world = MarketWorld([job], table, offers, 1000.0, hard_cap_dollars_per_hour=7.0)
    world.rent("a", 3, "a test")
    world.advance()
    made = [one for _, one in world.run()]

    assert world.has_ended()
    assert sum(isinstance(one, Release) for one in made) == 5  # at last also the two B
    assert sum(one.num_nodes for one in made if isinstance(one, Rent)) == 2
    assert [len(one.placement) for one in made if isinstance(one, Start)] == [2]


def test_a_drained_node_makes_way_once_however_many_jobs_wait():
    offers = (
        Offer(name="a", gpu="A", num_gpus=1, price_dollars_per_hour=2.0),
        Offer(name="b", gpu="B", num_gpus=1, price_dollars_per_hour=3.0),
    )
    world = MarketWorld([one_job()], {"m": options(1.0, kinds=2)}, offers, 1000.0,
                        hard_cap_dollars_per_hour=3.0)  # fmt: skip
    world.rent("b", 1, "a test")
    world.advance()
    seen = world.observe()
    none = np.zeros_like(seen.nodes.num_gpus)
    nodes = replace(seen.nodes, num_gpus=none, free=none)
    seen = replace(seen, nodes=nodes)
    wanted = Wanted(seen, {0: offers[0], 1: offers[1]}, make_room(seen), max_jobs=10)

    assert [wanted.add(np.array([1, 0])) for _ in range(3)] == [True, False, False]
    assert wanted.making_way == [0]


@pytest.mark.parametrize("share", [1, 3, 7])
def test_a_cap_that_is_a_sum_of_prices_pays_for_all_of_them(share):
    price = 0.1 * share
    offers = (Offer(name="a", gpu="A", num_gpus=1, price_dollars_per_hour=price),)
    world = MarketWorld(
        [one_job(min_gpus=4)], {"m": options(1.0, 1.9, 3.5)}, offers, 1000.0,
        hard_cap_dollars_per_hour=price + price + price + price,
    )  # fmt: skip
    world.run()

    assert world.has_ended()


def test_the_owner_s_limits_are_kept():
    offers = (
        Offer(name="a", gpu="A", num_gpus=4, price_dollars_per_hour=4.0),
        Offer(name="b", gpu="B", num_gpus=4, price_dollars_per_hour=40.0),
    )
    table = {"m": joined(options(1.0, 1.9, 3.5, kinds=2), options(1.1, 2.0, 3.6, kinds=2, kind=1))}

    def rented(job: JobSpec) -> list[tuple[str, int]]:
        world = MarketWorld([job], table, offers, 1000.0)
        decisions, _ = budget(world.observe(), None)
        return [(one.offer, one.num_nodes) for one in decisions]

    assert rented(one_job(allowed_gpus=frozenset({"B"}))) == [("b", 1)]
    assert rented(one_job(allowed_gpus=frozenset({"A"}))) == [("a", 1)]
    assert rented(one_job(denied_gpus=("A",))) == [("b", 1)]
    assert rented(one_job(denied_gpus=("B",))) == [("a", 1)]

    world = MarketWorld([one_job(min_gpus=64)], table, offers, 1000.0)
    assert [type(one) for one in budget(world.observe(), None)[0]] == [Refuse]


def test_the_budget_decides_which_gpu_type_is_rented():
    offers = (
        Offer(name="slow", gpu="A", num_gpus=1, price_dollars_per_hour=1.0),
        Offer(name="fast", gpu="B", num_gpus=1, price_dollars_per_hour=6.0),
    )
    table = {"m": joined(options(1.0, kinds=2), options(4.0, kinds=2, kind=1))}

    def rented(limit: float) -> list[tuple[str, int]]:
        jobs = [one_job(id=f"j{number}") for number in range(10)]
        world = MarketWorld(jobs, table, offers, limit)
        return [(one.offer, one.num_nodes) for one in budget(world.observe(), None)[0]]

    # Ten jobs in the first hour, each two dollars on the slow type or three on the fast one.
    assert rented(100.0) == [("fast", 10)]
    assert rented(19.0) == [("slow", 10)]


def test_a_running_job_is_resized_only_if_the_restart_pays():
    def decisions(startup_seconds: float, now_seconds: float = KEEP_SECONDS) -> list[object]:
        jobs = [one_job(max_gpus=4)]
        startup = StartupCost(seconds_per_gpu=startup_seconds, most_seconds=1e9)
        world = market_snapshot(jobs, 1e6, num_own=1, startup=startup)
        world.launch("j", 0, ((0, 1),), "")
        return budget(replace(world.observe(), now_seconds=now_seconds), None)[0]

    cheap, dear, fresh = decisions(1.0), decisions(1e5), decisions(1.0, KEEP_SECONDS / 2)
    assert [type(one) for one in cheap if not isinstance(one, Release)] == [Resize]
    assert dear == fresh == []


def test_unlimited_money_gives_everyone_the_fastest():
    world = market_snapshot([one_job()], float("inf"))
    made = world.run()

    assert [one.option for _, one in made if isinstance(one, Start)] == [3]


def test_deep_debt_stops_renting_while_a_job_runs():
    def decisions(*, is_running: bool) -> list[object]:
        world = market_snapshot([one_job(), one_job(id="k")], 10.0, num_own=1)
        if is_running:
            world.launch("j", 2, ((0, 4),), "")
        snapshot = world.observe()
        if not is_running:  # and nowhere to run
            snapshot = replace(snapshot, nodes=replace(snapshot.nodes, free=np.array([0])))
        _, memory = budget(snapshot, None)
        return budget(replace(snapshot, now_seconds=600.0, spent_dollars=1000.0), memory)[0]

    assert not [one for one in decisions(is_running=True) if isinstance(one, Rent)]
    # Nobody's end would bring another look: the first job goes on, on one node.
    rents = [one for one in decisions(is_running=False) if isinstance(one, Rent)]
    assert [one.num_nodes for one in rents] == [1]


# In a market


SPEEDS = {"well": GPUS**0.8, "badly": GPUS**0.45}
RATES = {"well": 0.004, "badly": 0.006}
MEAN_SAMPLES = 4000.0


def market(limit: float, number: int = 1500, seed: int = 1, **fields) -> MarketWorld:
    table = {name: options(*speeds.tolist()) for name, speeds in SPEEDS.items()}
    offers = fields.pop(
        "offers",
        (Offer(name="a", gpu="A", num_gpus=1, price_dollars_per_hour=1.0, most_nodes=999),),
    )
    return MarketWorld(stream(RATES, MEAN_SAMPLES, number, seed), table, offers, limit, **fields)


def theory(world: MarketWorld, spend: float) -> float:
    """The theorem's mean completion time for what was spent, from the sizes that came."""
    specs = [record.spec for record in world.state.jobs.values()]
    last = max(spec.submit_seconds for spec in specs)
    groups = [[spec.total_samples for spec in specs if spec.model == name] for name in SPEEDS]
    classes = classes_from_speeds(
        arrivals_per_second=[len(group) / last for group in groups],
        mean_samples=[float(np.mean(group)) for group in groups],
        price_dollars_per_hour=GPUS.astype(float),
        samples_per_second=np.array(list(SPEEDS.values())),
    )
    return trace_frontier(classes).at_budget(spend).mean_completion_seconds


@pytest.mark.slow
@pytest.mark.parametrize("limit", [60.0, 90.0])
def test_in_the_theorem_s_own_setting_the_policy_is_near_its_optimum(limit):
    """Single GPUs for rent, no delay, no restart cost; arrival rates learnt as they come."""
    world = market(limit)
    world.run()
    hours = world.last_submit / HOUR

    assert world.has_ended()
    assert world.spent_by_last_arrival / hours == pytest.approx(limit, rel=0.03)
    # All the money that the jobs took, for the time over which they came: boa.md 2.5, metrics.
    assert world.mean_completion_seconds() <= 1.03 * theory(world, world.spent_dollars / hours)


@pytest.mark.parametrize(
    ("num_jobs", "hours", "load"), [(8, 0.0, 24.0), (1, 8.0, 2.01), (984, 100.0, 9.955)]
)
def test_the_owner_s_budget_tells_the_load_until_many_jobs_have_come(num_jobs, hours, load):
    """A job costs a dollar: what the budget tells of their rate counts as much as 16 jobs."""
    snapshot = replace(market(70.0, number=1).observe(), now_seconds=hours * HOUR)
    one_class = np.eye(1, len(snapshot.options.samples_per_second))[0] * num_jobs
    arrivals = replace(
        first_arrivals(0.0),
        num_jobs=one_class,
        samples=1000 * one_class,
        weights=one_class,
        startups=-one_class,
    )
    prices = HOUR / 1000.0 * snapshot.options.samples_per_second

    classes, _, _ = believed_classes(arrivals, snapshot, prices, {})

    assert HOUR * classes.arrivals_per_second.sum() == pytest.approx(load, rel=0.01)


def test_the_same_market_gives_the_same_decisions():
    one, two = market(70.0, number=60), market(70.0, number=60)

    assert one.run() == two.run()


@pytest.mark.slow
@pytest.mark.parametrize(
    "fields",
    [
        {"knows_lengths": False},
        {"num_own": 30},
        {"startup": StartupCost(seconds_per_gpu=10.0, most_seconds=40.0)},
        {
            "offers": (
                Offer(
                    name="a",
                    gpu="A",
                    num_gpus=4,
                    price_dollars_per_hour=4.0,
                    start_delay_seconds=120.0,
                ),
            )
        },
    ],
    ids=["unknown lengths", "own nodes", "startup cost", "whole nodes with a delay"],
)
def test_every_job_ends_and_the_budget_is_kept(fields):
    world = market(75.0, number=300, **fields)
    world.run()
    hours = world.now_seconds / HOUR

    assert world.has_ended()
    assert world.rate == 0
    assert world.spent_dollars / hours <= 75.0 * 1.05  # of 300 jobs; of 1,500 see above: 3 %


@pytest.mark.parametrize("limit", [3.3, 40.0])
def test_money_that_jobs_cannot_use_keeps_places_for_those_to_come(limit):
    """A node takes ten minutes to come; jobs of 25 minutes use 3.3 dollars an hour."""
    offers = (
        Offer(name="a", gpu="A", num_gpus=1, price_dollars_per_hour=1.0, start_delay_seconds=600.0),
    )
    jobs = stream({"m": 1 / 450}, 1500.0, 80, seed=2)
    world = MarketWorld(jobs, {"m": options(1.0)}, offers, limit)
    made = world.run()

    ahead = [one for _, one in made if isinstance(one, Rent) and "next jobs" in one.reason]
    records = list(world.state.jobs.values())[40:]
    at_once = [one for one in records if one.first_start_seconds - one.spec.submit_seconds < 1.0]
    assert world.has_ended()
    assert world.rate == 0.0
    assert world.spent_dollars <= 1.1 * limit * world.last_submit / HOUR
    assert ahead
    assert len(at_once) >= (36 if limit > 10.0 else 0)


@pytest.mark.parametrize(("cap", "kept", "rented"), [(3.0, 0, 0), (5.0, 2, 1), (np.inf, 2, 2)])
def test_under_a_hard_cap_who_waits_comes_before_who_may_come(cap, kept, rented):
    """Two nodes stand idle, one job needs another one, and three places could be paid for."""
    offers = (Offer(name="a", gpu="A", num_gpus=1, price_dollars_per_hour=1.0),)
    world = MarketWorld([one_job()], {"m": options(1.0)}, offers, 9.0)
    world.rent("a", 3, "a test")
    world.advance()
    snapshot = replace(world.observe(), hard_cap_dollars_per_hour=cap)
    room = make_room(snapshot)
    room.take(((2, 1),))  # the third one is at work
    wanted = Wanted(snapshot, {0: offers[0]}, room, np.inf)
    wanted.num_nodes = lambda: {0: 1}
    made, num_kept = rent_and_release(snapshot, wanted=wanted, room=room, spares={0: 3})

    assert num_kept.get(0, 0) == kept
    assert sum(one.num_nodes for one in made if isinstance(one, Rent)) == rented
    assert sum(isinstance(one, Release) for one in made) == 2 - kept


@pytest.mark.slow
def test_a_budget_below_the_load_makes_jobs_wait_and_not_the_spend_grow():
    world = market(30.0, number=300)  # the load is 40 GPUs at a dollar an hour
    world.run()
    owed = world.spent_dollars - 30.0 * world.now_seconds / HOUR

    assert world.has_ended()
    horizon_hours = HORIZON_ARRIVALS / sum(RATES.values()) / HOUR
    assert owed <= 1.2 * horizon_hours * 30.0
    enough = market(60.0, number=300)
    enough.run()
    assert world.mean_completion_seconds() > 1.5 * enough.mean_completion_seconds()
