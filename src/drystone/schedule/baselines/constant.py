"""The stupid opponent: every job gets the same number of GPUs, on nodes rented at once.

Nobody waits but for nodes to come, nobody is resized, and no budget is looked at: the money is what
comes of it. `constant:8` gives everybody 8 GPUs of the type that costs least for the work,
`constant:8xL40S` those of one type. A job that has no such option gets the next larger one, or its
largest. `constant` alone is one whole node of the cheapest offer; in comparisons it is the best of
all widths and types in hindsight (`observe/opponents.py`).
"""

from __future__ import annotations

import numpy as np

from drystone.errors import InvalidSpec
from drystone.schedule.budget.acting import Terms, act_on, job_prices, limits_now
from drystone.schedule.budget.leftovers import option_prices
from drystone.schedule.decision import Decision, Memory, Policy
from drystone.schedule.packing import make_room
from drystone.schedule.renting import cheapest_offers, gpu_price
from drystone.schedule.snapshot import FloatArray, Snapshot


def constant(snapshot: Snapshot, memory: Memory) -> tuple[list[Decision], Memory]:
    """As many GPUs for everybody as a node of the cheapest offer has; 8 without offers."""
    cheapest = min(snapshot.offers, key=gpu_price, default=None)
    width = 8 if cheapest is None else cheapest.num_gpus
    return _decide(snapshot, memory, width, "")


def make_constant(width_and_type: str) -> Policy:
    """The policy of a width, such as `8` or `8xL40S`."""
    width, _, gpu = width_and_type.partition("x")
    if not width.isdecimal() or int(width) < 1:
        raise InvalidSpec(
            f"constant:{width_and_type} names no number of GPUs",
            hint="Write constant:8, or constant:8xL40S for GPUs of one type",
        )
    return lambda snapshot, memory: _decide(snapshot, memory, int(width), gpu)


def _decide(
    snapshot: Snapshot, picks: Memory, width: int, gpu: str
) -> tuple[list[Decision], Memory]:
    offers = cheapest_offers(
        snapshot.offers, snapshot.gpu_types, snapshot.hard_cap_dollars_per_hour
    )
    whole = np.zeros(len(snapshot.gpu_types))
    limits = limits_now(snapshot, offers, {}, 0.0)
    terms = Terms(
        offers=offers,
        used_shares=whole,
        prices=job_prices(snapshot, option_prices(snapshot, offers, whole), limits),
        limits=limits,
        picks=picks or {},
    )
    values = _only_width(snapshot, terms.prices, width, gpu)
    acts = act_on(snapshot, terms, values, make_room(snapshot))
    return acts.decisions, acts.picks


def _only_width(snapshot: Snapshot, prices: FloatArray, width: int, gpu: str) -> FloatArray:
    """0 for the one option that each job is to have, infinite for all others."""
    number, speeds = snapshot.job_num_gpus, snapshot.job_speeds
    able = (speeds > 0) & np.isfinite(prices)
    if gpu in snapshot.gpu_types:
        column = snapshot.gpu_types.index(gpu)
        counts = snapshot.options.counts[snapshot.jobs.option_set]
        named = able & (counts[:, :, column] == number)
        able = np.where(named.any(axis=1, keepdims=True), named, able)
    above = np.where(able & (number >= width), number, np.inf).min(axis=1, initial=np.inf)
    largest = np.where(able, number, 0).max(axis=1, initial=0)
    wanted = np.where(np.isfinite(above), above, largest)
    here = able & (number == wanted[:, None])
    cost = np.where(here, prices / np.where(here, speeds, 1.0), np.inf)
    fastest = -speeds / (1.0 + speeds.max(initial=0.0))  # of equally cheap ones
    rank = np.where(here, cost + 1e-12 * fastest, np.inf)
    is_least = here & (rank == rank.min(axis=1, keepdims=True, initial=np.inf))
    return np.where(is_least, 0.0, np.inf)
