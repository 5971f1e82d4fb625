"""Whole-node prices: what an option costs where nodes are billed whole and jobs use part of them.

A job on r GPUs of a node of n leaves n - r. What is left is worth what others can use of it: if
they use a share u, the job costs r + (1 - u) (n - r) GPUs, and whoever uses what another left costs
u GPUs for each, for as long as the other is there.

How much others use depends on how many there are. If N jobs are present on average that take part
of a node, their number is close to Poisson, and packed onto each other's nodes they leave about one
node's worth idle while any of them is there, which is for a share 1 - exp(-N) of the time. Alone on
a node each they would leave the sum of their n - r. So

    u = 1 - n (1 - exp(-N)) / sum (n - r),     0 where that is negative.

With few such jobs u is 0: nodes are bought whole, so they are used whole. With many, a GPU costs
what a GPU costs.
"""

from __future__ import annotations

from collections.abc import Mapping
from typing import NamedTuple

import numpy as np

from drystone.describe.market import Offer
from drystone.schedule.packing import Room
from drystone.schedule.renting import gpu_price, option_rents, own_gpus, rounded_cap
from drystone.schedule.snapshot import FloatArray, IntArray, Snapshot


def option_prices(
    snapshot: Snapshot, offers: Mapping[int, Offer], used_shares: FloatArray
) -> FloatArray:
    """Dollars an hour of every option, (sets, options), where others use such shares, by type.

    Infinite where a type cannot be had, and where what must be rented is above the hard cap. GPUs
    of a type that is not for rent cost nothing: they are the owner's.
    """
    counts, cap = snapshot.options.counts, snapshot.hard_cap_dollars_per_hour
    prices = np.zeros(counts.shape[:2])
    for kind, has_own in enumerate((snapshot.capacity > 0).tolist()):
        offer = offers.get(kind)
        if offer is not None:
            prices += billed_gpus(counts[..., kind], offer, used_shares[kind]) * gpu_price(offer)
        elif not has_own:
            prices[counts[..., kind] > 0] = np.inf
    if np.isfinite(cap):
        prices[option_rents(counts, own_gpus(snapshot), offers) > rounded_cap(cap)] = np.inf
    return prices


def billed_gpus(counts: IntArray, offer: Offer, used_share: float) -> FloatArray:
    """GPUs that so many cost, with what they leave of their last node."""
    left = -counts % offer.num_gpus
    billed: FloatArray = counts + (1.0 - used_share) * left
    return billed


def used_shares(
    counts: IntArray, present: FloatArray, offers: Mapping[int, Offer], num_types: int
) -> FloatArray:
    """By type: the share u. `counts` is (classes, types), `present` the mean number of each."""
    shares = np.ones(num_types)
    for kind, offer in offers.items():
        left = -counts[:, kind] % offer.num_gpus
        sharing = left > 0
        number, total = float(present[sharing].sum()), float((present * left).sum())
        if total > 0:
            idle = offer.num_gpus * -np.expm1(-number)
            shares[kind] = max(1.0 - idle / total, 0.0)
        elif offer.num_gpus > 1:
            shares[kind] = 0.0  # nobody is there to share with
    return shares


class Places(NamedTuple):
    """For every job and option, (jobs, options): where it would start now."""

    wait_seconds: FloatArray  # until nodes that have to be rented are here
    saved_dollars_per_hour: FloatArray  # of a node that somebody else pays for
    saved_seconds: FloatArray  # for so long


def find_places(
    snapshot: Snapshot, offers: Mapping[int, Offer], used_shares: FloatArray, room: Room
) -> Places:
    """On what is left of nodes where it fits, then on idle nodes, then on rented ones."""
    counts = snapshot.options.counts[snapshot.jobs.option_set]
    wait, dollars, seconds = (np.zeros(counts.shape[:2]) for _ in range(3))
    held = held_seconds(snapshot)
    for kind, offer in offers.items():
        size, rows = offer.num_gpus, snapshot.nodes.rows_by_type[kind]
        free = room.free[rows]
        num_idle = int((free == size).sum())
        host = np.zeros(size + 1)  # how long the node with room for so many is held by others
        for number in range(1, size):
            able = np.flatnonzero((free >= number) & (free < size))
            if len(able):
                host[number] = held[rows[able[free[able].argmin()]]]
        num_whole, rest = np.divmod(counts[..., kind], size)
        shares = host[rest] > 0
        num_needed = num_whole + ((rest > 0) & ~shares)
        wait = np.maximum(wait, np.where(num_needed > num_idle, offer.start_delay_seconds, 0.0))
        saved = (1.0 - used_shares[kind]) * offer.price_dollars_per_hour
        dollars = np.where(shares, saved, dollars)
        seconds = np.where(shares, host[rest], seconds)
    return Places(wait, dollars, seconds)


def held_seconds(snapshot: Snapshot) -> FloatArray:
    """By node: how long the jobs that run there go on, as far as it is known."""
    held = np.zeros(len(snapshot.nodes))
    if not snapshot.knows_lengths:
        return held
    jobs, rows = snapshot.jobs, snapshot.running
    speeds = snapshot.job_speeds[rows, jobs.option[rows]]
    left = jobs.remaining_samples[rows] / np.where(speeds > 0, speeds, np.inf)
    for row, seconds in zip(rows.tolist(), left.tolist(), strict=True):
        for node, _ in jobs.placements[row]:
            held[node] = max(held[node], seconds)
    return held
