"""Pollux: a genetic search over who gets which GPUs, each minute, blind to GPU types.

After Qiao et al., OSDI 2021, and its artifact (github:petuum/adaptdl, branch osdi21-artifact). The
search (`search.py`) maximises the power mean, p = -1, of speedups over what a job
would do with its fair share of the GPUs. A job at most doubles the GPUs it has had so far, since
Pollux learns how it scales while it runs; `pollux-freed` is without this rule, which who is told
all speeds does not need. A change is worth only (age - restarts x cost) / (age + cost) of its
speedup.

On GPUs of several types a speedup is the mean over the types of how speeds grow with the count; it
cannot tell a fast GPU from a slow one. Chance is drawn from the time and the size of the snapshot:
the same snapshot gives the same decisions.
"""

from __future__ import annotations

import math
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from typing import Final

import numpy as np

from drystone.schedule.baselines.pollux.search import SharingSearch, search_sharing
from drystone.schedule.decision import (
    NO_SINGLE_TYPE,
    Decision,
    Preempt,
    Resize,
    Start,
    Wake,
    change_job,
    refuse_jobs,
)
from drystone.schedule.snapshot import BoolArray, FloatArray, IntArray, Placement, Snapshot

ROUND_SECONDS: Final = 60.0


@dataclass(frozen=True, slots=True, kw_only=True, eq=False)
class PolluxMemory:
    """What one round leaves to the next."""

    states: IntArray  # (states, jobs, nodes): the best ones, by `jobs` and `nodes`
    jobs: tuple[str, ...]
    nodes: tuple[str, ...]
    max_gpus: Mapping[str, int] = field(default_factory=dict)  # that each job has had


def pollux(
    snapshot: Snapshot, memory: PolluxMemory | None
) -> tuple[list[Decision], PolluxMemory | None]:
    """One round on the nodes that there are."""
    nodes = np.flatnonzero(snapshot.nodes.num_gpus > 0)
    return share_gpus(snapshot, memory, nodes)


def pollux_freed(
    snapshot: Snapshot, memory: PolluxMemory | None
) -> tuple[list[Decision], PolluxMemory | None]:
    """One round in which every job may have as many GPUs as it can use from the start."""
    nodes = np.flatnonzero(snapshot.nodes.num_gpus > 0)
    return share_gpus(snapshot, memory, nodes, doubles=False)


def share_gpus(
    snapshot: Snapshot, memory: PolluxMemory | None, nodes: IntArray, *, doubles: bool = True
) -> tuple[list[Decision], PolluxMemory | None]:
    """One round on some of the nodes; jobs on others leave them.

    `doubles`: a job at most doubles the GPUs that it has had.
    """
    jobs = snapshot.jobs
    lookup = option_lookup(snapshot)
    has_none = lookup.max(axis=(1, 2), initial=-1) < 0
    hopeless = has_none[jobs.option_set] & ~jobs.is_running
    refusals = refuse_jobs(jobs, hopeless, NO_SINGLE_TYPE)
    rows = np.flatnonzero(~hopeless)
    if not len(rows) or not len(nodes):
        return [*refusals, *_preempt_all(snapshot, rows)], memory
    most = max_gpus(snapshot, memory)
    if not doubles:
        most = np.full(len(jobs), int(snapshot.capacity.sum()))
    rows = rows[np.argsort(jobs.attained_gpu_seconds[rows], kind="stable")]
    problem = _problem(snapshot, rows, nodes, most, lookup)
    names = tuple(jobs.specs[row].id for row in rows)
    node_names = tuple(snapshot.nodes.ids[node] for node in nodes)
    chance = np.random.default_rng([int(snapshot.now_seconds * 1000), len(rows), len(nodes)])
    states = search_sharing(problem, chance, _adapt(memory, names, node_names))
    decisions = _decide(snapshot, rows, nodes, states[0], lookup)
    kept = {spec.id: int(count) for spec, count in zip(jobs.specs, most, strict=True) if count}
    remembered = PolluxMemory(states=states, jobs=names, nodes=node_names, max_gpus=kept)
    return [*refusals, *decisions, *_wake(snapshot, decisions, lookup)], remembered


def _wake(snapshot: Snapshot, decisions: Sequence[Decision], lookup: IntArray) -> list[Decision]:
    """Where the world has no rounds: whoever got GPUs now may get more a minute later.

    Neither does chance find a place for everybody at once: whoever could run on what is free is
    looked at again, with other chances.
    """
    at = (math.floor(snapshot.now_seconds / ROUND_SECONDS) + 1) * ROUND_SECONDS
    if any(isinstance(decision, Start | Resize) for decision in decisions):
        return [Wake(at_seconds=at, reason="jobs have had more GPUs by then and may get more")]
    if _is_passed_over(snapshot, lookup):
        return [Wake(at_seconds=at, reason="the search found no place for a job that has one")]
    return []


def _is_passed_over(snapshot: Snapshot, lookup: IntArray) -> bool:
    """Whether a job waits that has an option of one type within what is free of it."""
    nodes, jobs = snapshot.nodes, snapshot.jobs
    free = np.bincount(nodes.type_index, weights=nodes.free, minlength=lookup.shape[1])
    is_free = np.arange(lookup.shape[2]) <= free[:, None]
    could_run: BoolArray = np.any((lookup >= 0) & is_free, axis=(1, 2))
    return bool((could_run[jobs.option_set] & ~jobs.is_running).any())


def option_lookup(snapshot: Snapshot) -> IntArray:
    """The option of so many GPUs of a type, (sets, types, counts); -1 where there is none."""
    options = snapshot.options
    num_sets, _, num_types = options.counts.shape
    most = int(options.num_gpus.max(initial=0))
    table = np.full((num_sets, num_types, most + 1), -1, dtype=np.int64)
    is_plain = ((options.counts > 0).sum(axis=2) == 1) & (options.samples_per_second > 0)
    sets, columns = np.nonzero(is_plain)
    kinds = np.argmax(options.counts[sets, columns], axis=1)
    table[sets, kinds, options.num_gpus[sets, columns]] = columns
    return table


def blind_speedups(snapshot: Snapshot, lookup: IntArray) -> FloatArray:
    """How speed grows with GPUs whatever their type, (sets, counts): 1 for the least count."""
    sets = np.arange(len(lookup))[:, None, None]
    speeds = np.where(lookup >= 0, snapshot.options.samples_per_second[sets, lookup], np.nan)
    exists = ~np.isnan(speeds)
    least = np.argmax(exists, axis=2)[:, :, None]
    base = np.take_along_axis(speeds, least, axis=2)
    relative = np.where(exists, speeds / base, 0.0)
    number = exists.sum(axis=1)
    result: FloatArray = relative.sum(axis=1) / np.maximum(number, 1)
    return result


def _problem(
    snapshot: Snapshot, rows: IntArray, nodes: IntArray, most: IntArray, lookup: IntArray
) -> SharingSearch:
    table, jobs = snapshot.nodes, snapshot.jobs
    blind = blind_speedups(snapshot, lookup)[jobs.option_set[rows]]
    fair = int(np.ceil(table.num_gpus[nodes].sum() / len(rows)))
    blind = blind / _at_fair_share(blind, fair)
    exists = lookup[jobs.option_set[rows]] >= 0
    base = np.zeros((len(rows), len(nodes)), dtype=np.int64)
    column = {int(node): at for at, node in enumerate(nodes)}
    for at, row in enumerate(rows):
        for node, count in jobs.placements[row]:
            if node in column:
                base[at, column[node]] = count
    sizes = np.array(
        [table.num_gpus[some].max(initial=1) for some in table.rows_by_type], dtype=np.int64
    )
    least = np.argmax(exists.any(axis=1), axis=1)
    limit = np.where(most[rows] > 0, 2 * most[rows], least)
    return SharingSearch(
        node_gpus=table.num_gpus[nodes],
        node_type=table.type_index[nodes],
        type_gpus_per_node=sizes,
        values=_padded(np.where(exists, blind[:, None, :], 0.0), int(table.num_gpus[nodes].sum())),
        max_gpus=np.maximum(limit, least),
        base=base,
        change_factor=change_factors(snapshot)[rows],
    )


def _at_fair_share(blind: FloatArray, fair: int) -> FloatArray:
    """The speedup of each job with its fair share, or with the most below it that it can use."""
    counts = np.arange(blind.shape[1])
    usable = (blind > 0) & (counts <= fair)
    at = np.where(usable.any(axis=1), np.where(usable, counts, 0).max(axis=1), 0)
    found = blind[np.arange(len(blind)), at]
    first = blind[np.arange(len(blind)), np.argmax(blind > 0, axis=1)]
    base = np.where(found > 0, found, first)
    result: FloatArray = np.where(base > 0, base, 1.0)[:, None]
    return result


def _padded(values: FloatArray, most: int) -> FloatArray:
    """Wide enough for every count that the nodes could give."""
    width = max(most + 1 - values.shape[2], 0)
    return np.pad(values, ((0, 0), (0, 0), (0, width)))


def change_factors(snapshot: Snapshot) -> FloatArray:
    """What a speedup is worth that needs a restart: the share of its age a job is at work.

    Whoever waits has nothing to restart.
    """
    jobs = snapshot.jobs
    cost = snapshot.startup_seconds.max(axis=1, initial=0.0)
    age = snapshot.now_seconds - np.array([spec.submit_seconds for spec in jobs.specs])
    lost = np.maximum(jobs.num_starts - 1, 0) * cost
    factor = np.maximum(age - lost, 0.0) / np.maximum(age + cost, 1e-9)
    result: FloatArray = np.where(jobs.is_running, factor, 1.0)
    return result


def _adapt(
    memory: PolluxMemory | None, jobs: Sequence[str], nodes: Sequence[str]
) -> IntArray | None:
    """The states of the round before, for the jobs and nodes of this one."""
    if memory is None:
        return None
    job_at = {name: at for at, name in enumerate(memory.jobs)}
    node_at = {name: at for at, name in enumerate(memory.nodes)}
    states = np.zeros((len(memory.states), len(jobs), len(nodes)), dtype=np.int64)
    kept_nodes = [at for at, name in enumerate(nodes) if name in node_at]
    old_nodes = [node_at[nodes[at]] for at in kept_nodes]
    for at, name in enumerate(jobs):
        if name in job_at:
            states[:, at, kept_nodes] = memory.states[:, job_at[name]][:, old_nodes]
    return states


def _decide(
    snapshot: Snapshot, rows: IntArray, nodes: IntArray, state: IntArray, lookup: IntArray
) -> list[Decision]:
    """From the chosen state to decisions, in the order of submission."""
    jobs = snapshot.jobs
    decisions: list[Decision] = []
    for at in np.argsort(rows):
        row = int(rows[at])
        used = np.flatnonzero(state[at])
        placement = tuple((int(nodes[column]), int(state[at, column])) for column in used)
        option = -1
        if len(used):
            kind, count = snapshot.nodes.type_index[nodes[used[0]]], int(state[at].sum())
            if count < lookup.shape[2]:  # more than any option takes is of no use to it
                option = int(lookup[jobs.option_set[row], kind, count])
        decision = _decision(snapshot, row, option, placement)
        if decision is not None:
            decisions.append(decision)
    return decisions


def _decision(snapshot: Snapshot, row: int, option: int, placement: Placement) -> Decision | None:
    jobs = snapshot.jobs
    name, now = jobs.specs[row].id, int(jobs.option[row])
    if option < 0 or not placement:
        text = "the search found more use for its GPUs elsewhere"
        return Preempt(job_id=name, reason=text) if now >= 0 else None
    return change_job(
        jobs,
        row,
        option,
        placement,
        reason="the best sharing that the search found",
        numbers={"gpus": float(sum(count for _, count in placement))},
    )


def _preempt_all(snapshot: Snapshot, rows: IntArray) -> list[Decision]:
    running: BoolArray = snapshot.jobs.is_running
    return [
        Preempt(job_id=snapshot.jobs.specs[row].id, reason="there are no nodes")
        for row in rows
        if running[row]
    ]


def max_gpus(snapshot: Snapshot, memory: PolluxMemory | None) -> IntArray:
    """The most GPUs that each job has had so far."""
    jobs = snapshot.jobs
    before = memory.max_gpus if memory is not None else {}
    most = np.array([before.get(spec.id, 0) for spec in jobs.specs], dtype=np.int64)
    running = np.flatnonzero(jobs.is_running)
    held = snapshot.job_num_gpus[running, jobs.option[running]]
    most[running] = np.maximum(most[running], held)
    return most
