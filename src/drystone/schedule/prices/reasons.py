"""Reasons of decisions by prices: what was compared with what, and by how much.

A job that starts is told how its option compares with the best of its others; a job that is
resized, how it compares with what it had. Speeds and prices are those of the decision.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Final

from drystone.schedule.decision import Numbers
from drystone.schedule.prices.worth import Worth
from drystone.schedule.snapshot import FloatArray, Placement, Snapshot
from drystone.schedule.words import NO_CHOICE, cost_words, name_gpus, speed_words
from drystone.units import format_seconds

# Why a job is given an option, where the words are made when all is settled.
PICKED: Final = "picked"
LEFT_OVER: Final = "left over"
GREW: Final = "grew"
_MAX_NAMED: Final = 2  # jobs that a reason names, before it counts the others


def price_numbers(
    snapshot: Snapshot, worth: Worth, row: int, option: int, paid: FloatArray
) -> Numbers:
    """What the option is worth and costs, the best of those that lost, and how they compare."""
    values = worth.values[row].tolist()
    costs = paid[snapshot.jobs.option_set[row]].tolist()
    left = [value - cost for value, cost in zip(values, costs, strict=True)]
    found = {"value": values[option], "paid": costs[option]}
    others = [other for other, value in enumerate(values) if value > 0 and other != option]
    if not others:
        return found
    second = max(others, key=left.__getitem__)
    found |= {"second_option": float(second), "second_left": left[second]}
    before = int(snapshot.jobs.option[row])
    compared = before if before in others else second
    speeds = worth.speeds[row]
    found["compared_option"] = float(compared)
    found["times_as_fast"] = float(speeds[option] / speeds[compared])
    if costs[compared] > 0:
        found["times_the_price"] = costs[option] / costs[compared]
    return found


def why_given(
    snapshot: Snapshot, worth: Worth, row: int, option: int, cause: str, numbers: Numbers
) -> str:
    """The words for `PICKED`, `LEFT_OVER` and `GREW`; other causes are words already."""
    if cause not in (PICKED, LEFT_OVER, GREW):
        return cause
    before = int(snapshot.jobs.option[row])
    if option == before:
        return "its nodes are taken out: it goes on with the same GPUs on others"
    if "compared_option" not in numbers:
        words = NO_CHOICE
    else:
        words = _compared(snapshot, row, option, numbers)
    if before >= 0:
        words += _saved(snapshot, worth, row, before, option)
    if cause == PICKED:
        return words
    return f"{words}; the GPUs were left over by jobs that gain more from others"


def why_no_node(snapshot: Snapshot, worth: Worth, row: int, pick: int, option: int) -> str:
    """For a job whose pick is free in number, but not on one node."""
    ratio = float(worth.speeds[row, pick] / worth.speeds[row, option])
    wanted, got = name_gpus(snapshot, row, pick), name_gpus(snapshot, row, option)
    return f"{wanted} would be {ratio:.3g} times as fast as {got}, and find no place together now"


def why_moved(snapshot: Snapshot, row: int, gain: float, cost: float) -> str:
    """For a job that leaves its node to another, which gains this much by moves of that cost."""
    job_id = snapshot.jobs.specs[row].id
    return f"it makes room for job {job_id}, which gains {gain / cost:.3g} times what moving costs"


def why_stopped(
    snapshot: Snapshot, worth: Worth, row: int, paid: FloatArray, takers: Sequence[int]
) -> str:
    """For a job that loses its GPUs to others."""
    jobs, option = snapshot.jobs, int(snapshot.jobs.option[row])
    gpus, value = name_gpus(snapshot, row, option), float(worth.values[row, option])
    if value <= 0:
        return f"it may not use its {gpus} any longer"
    price = float(paid[jobs.option_set[row], option])
    words = f"its {gpus} cost {price / value:.3g} times what they are worth to it at these prices"
    if not takers:
        return words
    named = ", ".join(jobs.specs[taker].id for taker in takers[:_MAX_NAMED])
    more = f" and {len(takers) - _MAX_NAMED} more" if len(takers) > _MAX_NAMED else ""
    who = f"jobs {named}{more} get" if len(takers) > 1 else f"job {named} gets"
    return f"{words}: {who} them"


def takers_of(snapshot: Snapshot, placed: Mapping[int, Placement], row: int) -> list[int]:
    """Jobs that are put on nodes of this one where they were not before."""
    placements = snapshot.jobs.placements
    nodes = {node for node, _ in placements[row]}
    return [
        other
        for other, placement in sorted(placed.items())
        if other != row
        and not nodes.isdisjoint(
            {node for node, _ in placement} - {node for node, _ in placements[other]}
        )
    ]


def _compared(snapshot: Snapshot, row: int, option: int, numbers: Numbers) -> str:
    """How fast, and for how much, beside another option."""
    other, ratio = int(numbers["compared_option"]), numbers["times_as_fast"]
    words = speed_words(snapshot, row, option, other, ratio)
    if numbers["paid"] <= 0:
        paid_by = f", while others pay for {name_gpus(snapshot, row, other)}" if ratio < 1 else ""
        return f"{words}, and nobody else is short of such GPUs{paid_by}"
    price = numbers.get("times_the_price", 0.0)
    return words + cost_words(price, "price") if price > 0 else words


def _saved(snapshot: Snapshot, worth: Worth, row: int, before: int, option: int) -> str:
    """How much sooner a running job ends by a change, its restart included."""
    speeds, left = worth.speeds[row], float(snapshot.jobs.remaining_samples[row])
    if not snapshot.knows_lengths or speeds[before] <= 0:
        return ""
    restart = float(snapshot.startup_seconds[row, option])
    saved = left / float(speeds[before]) - left / float(speeds[option]) - restart
    if saved <= 0:
        return ""
    return (
        f"; it ends {format_seconds(saved)} sooner, restart of {format_seconds(restart)} included"
    )
