"""Pollux that rents: as many nodes as keep its utility between two bounds.

Utility is the sum of speedups over one GPU, divided by the GPUs that there are: 1 where every GPU
does the work of one alone, less where jobs are spread thin. If its mean over the last rounds leaves
the bounds, the number of nodes is sought by halving at which the best sharing would have the
utility half-way between them. After Qiao et al., OSDI 2021, section 4.2.2, and the artifact
(github:petuum/adaptdl, branch osdi21-artifact: bounds of 0.35 and 0.65). The mean is over two
rounds, as in BOA's experiments; the artifact's simulator takes 15, which on BOA's workload costs
more money and more time. The sharing at a size that is not there is found exactly by counts.

The money is what comes of it: to compare at equal money, move the bounds.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import Final

import numpy as np

from drystone.schedule.baselines.pollux.policy import (
    PolluxMemory,
    blind_speedups,
    max_gpus,
    option_lookup,
    share_gpus,
)
from drystone.schedule.decision import Decision, Policy, Release, Rent
from drystone.schedule.renting import gpu_price, rents_under_cap
from drystone.schedule.snapshot import FloatArray, IntArray, Snapshot

LOW_UTILITY: Final = 0.35
HIGH_UTILITY: Final = 0.65
WINDOW_ROUNDS: Final = 2
MIN_NODES: Final = 1
MAX_NODES: Final = 40
_SMALLEST_SPEEDUP: Final = 1e-3


@dataclass(frozen=True, slots=True, kw_only=True, eq=False)
class AutoscaleMemory:
    """What one round leaves to the next."""

    sharing: PolluxMemory | None
    utilities: tuple[float, ...]  # of the last rounds, since the number of nodes was changed


@dataclass(frozen=True, slots=True, kw_only=True)
class Bounds:
    """Between which utilities, and which numbers of nodes."""

    low_utility: float = LOW_UTILITY
    high_utility: float = HIGH_UTILITY
    window_rounds: int = WINDOW_ROUNDS
    min_nodes: int = MIN_NODES
    max_nodes: int = MAX_NODES

    @property
    def target_utility(self) -> float:
        """What is aimed at when the number of nodes changes."""
        return (self.low_utility + self.high_utility) / 2


def make_pollux_autoscale(bounds: Bounds) -> Policy:
    """The policy with these bounds."""

    def decide(
        snapshot: Snapshot, memory: AutoscaleMemory | None
    ) -> tuple[list[Decision], AutoscaleMemory]:
        return _decide(snapshot, memory, bounds)

    return decide


def pollux_autoscale(
    snapshot: Snapshot, memory: AutoscaleMemory | None
) -> tuple[list[Decision], AutoscaleMemory]:
    """One round with the bounds of Pollux's scheduler."""
    return _decide(snapshot, memory, Bounds())


def _decide(
    snapshot: Snapshot, memory: AutoscaleMemory | None, bounds: Bounds
) -> tuple[list[Decision], AutoscaleMemory]:
    before = memory or AutoscaleMemory(sharing=None, utilities=())
    here = np.flatnonzero(snapshot.nodes.num_gpus > 0)
    if not snapshot.offers:  # nothing to rent: plain Pollux
        decisions, sharing = share_gpus(snapshot, before.sharing, here)
        return decisions, AutoscaleMemory(sharing=sharing, utilities=())
    offer = int(np.argmin([gpu_price(offer) for offer in snapshot.offers]))
    own = len(here) - int((snapshot.rentals.offer == offer).sum())
    num_nodes = own + snapshot.rentals.num_nodes(offer)
    is_settled = not snapshot.rentals.coming
    utilities = before.utilities
    if is_settled and len(here):
        utilities = (*utilities, utility_now(snapshot, here))[-bounds.window_rounds :]
    wanted = max(num_nodes, bounds.min_nodes if len(snapshot.jobs) else 0)
    mean = sum(utilities) / len(utilities) if utilities else bounds.target_utility
    full = len(utilities) >= bounds.window_rounds
    if full and not bounds.low_utility <= mean <= bounds.high_utility:
        wanted = best_size(snapshot, before.sharing, offer, bounds)
        utilities = ()
    wanted = min(wanted, snapshot.offers[offer].most_nodes + own)
    numbers = {"utility": mean, "nodes": float(num_nodes), "wanted_nodes": float(wanted)}
    leaving = _leaving(snapshot, offer, num_nodes - wanted)
    staying = np.setdiff1d(here, leaving)
    decisions, sharing = share_gpus(snapshot, before.sharing, staying)
    for node in leaving:
        why = f"a utility of {mean:.2f} is below {bounds.low_utility:.2f}"
        decisions.append(Release(node=int(node), reason=why, numbers=numbers))
    if wanted > num_nodes:
        why = f"a utility of {mean:.2f} is above {bounds.high_utility:.2f}"
        if num_nodes < bounds.min_nodes:
            why = "there are jobs and too few nodes to begin with"
        name, number = snapshot.offers[offer].name, wanted - num_nodes
        rent = Rent(offer=name, num_nodes=number, reason=why, numbers=numbers)
        cap_left = snapshot.hard_cap_dollars_per_hour - snapshot.committed_dollars_per_hour
        decisions += rents_under_cap([(snapshot.offers[offer], rent)], cap_left)
    return decisions, AutoscaleMemory(sharing=sharing, utilities=utilities)


def utility_now(snapshot: Snapshot, nodes: IntArray) -> float:
    """Speedups of the jobs that run, over the GPUs of these nodes."""
    jobs = snapshot.jobs
    running = np.flatnonzero(jobs.is_running)
    blind = blind_speedups(snapshot, option_lookup(snapshot))
    counts = snapshot.job_num_gpus[running, jobs.option[running]]
    speedup = blind[jobs.option_set[running], counts].sum()
    return float(speedup / max(int(snapshot.nodes.num_gpus[nodes].sum()), 1))


def best_size(snapshot: Snapshot, memory: PolluxMemory | None, offer: int, bounds: Bounds) -> int:
    """The number of nodes whose best sharing comes nearest to the utility that is aimed at."""
    if not len(snapshot.jobs):
        return bounds.min_nodes
    blind = blind_speedups(snapshot, option_lookup(snapshot))[snapshot.jobs.option_set]
    size = snapshot.offers[offer].num_gpus
    limits = np.maximum(2 * max_gpus(snapshot, memory), np.argmax(blind > 0, axis=1))
    blind = np.where(np.arange(blind.shape[1]) <= limits[:, None], blind, 0.0)

    def utility(num_nodes: int) -> float:
        return shared_speedup(blind, num_nodes * size) / max(num_nodes * size, 1)

    low, high = bounds.min_nodes, bounds.max_nodes
    while low + 1 < high:
        middle = (low + high) // 2
        if utility(middle) > bounds.target_utility:
            low = middle
        else:
            high = middle
    target = bounds.target_utility
    return low if abs(utility(low) - target) < abs(utility(high) - target) else high


def shared_speedup(blind: FloatArray, num_gpus: int) -> float:
    """The sum of speedups where so many GPUs are shared for the best power mean, p = -1.

    Exact for counts; nodes are left out. `blind` is (jobs, counts), 0 where a job cannot run.
    """
    num_jobs = len(blind)
    fair = min(max(-(-num_gpus // num_jobs), 1), blind.shape[1] - 1)
    base = np.maximum.accumulate(blind, axis=1)[:, fair]
    base = np.where(base > 0, base, blind.max(axis=1, initial=0.0))
    relative = blind / np.where(base > 0, base, 1.0)[:, None]
    costs = 1.0 / (relative + _SMALLEST_SPEEDUP)
    costs[:, 1:][blind[:, 1:] <= 0] = np.inf
    total = np.zeros(num_gpus + 1)
    picks = np.zeros((num_jobs, num_gpus + 1), dtype=np.int64)
    for row in range(num_jobs):
        usable = np.flatnonzero(np.isfinite(costs[row]))
        usable = usable[usable <= num_gpus]
        best = np.full(num_gpus + 1, np.inf)
        for count in usable.tolist():
            with_count = np.full(num_gpus + 1, np.inf)
            with_count[count:] = total[: num_gpus + 1 - count] + costs[row, count]
            better = with_count < best
            best[better], picks[row, better] = with_count[better], count
        total = best
    left, speedup = num_gpus, 0.0
    for row in range(num_jobs - 1, -1, -1):
        count = int(picks[row, left])
        speedup += float(blind[row, count])
        left -= count
    return speedup


def _leaving(snapshot: Snapshot, offer: int, number: int) -> IntArray:
    """Rented nodes to give back: those with the fewest GPUs in use, of equals the youngest."""
    rented = snapshot.rentals.nodes[snapshot.rentals.offer == offer]
    if number <= 0 or not len(rented):
        return np.zeros(0, dtype=np.int64)
    since = snapshot.rentals.since_seconds[snapshot.rentals.offer == offer]
    used = snapshot.nodes.num_gpus[rented] - snapshot.nodes.free[rented]
    order = np.lexsort((rented, -since, used))
    return np.sort(rented[order[:number]])
