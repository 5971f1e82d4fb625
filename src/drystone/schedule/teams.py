"""Quotas and budgets of teams, as a narrower view of what a policy sees.

A quota is in GPUs of the most valuable type: each GPU counts `values[k]`, as fair shares count it.
A policy sees a job of a team with a quota only with the options that the quota has room for, and
the room is handed out in order of submission before it looks: whatever it decides keeps every
quota. A team whose budget is spent has nothing: what runs is stopped with a checkpoint, what waits
is held.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field, replace
from typing import Final

import numpy as np

from drystone.schedule.decision import Preempt
from drystone.schedule.snapshot import FloatArray, JobTable, OptionTable, Snapshot

_SLACK: Final = 1e-9


@dataclass(frozen=True, slots=True, kw_only=True)
class TeamLimit:
    """What one team may do now."""

    quota: float | None = None  # None: no limit
    spent: str = ""  # why nothing of it may run; empty: it may


@dataclass(frozen=True, slots=True, kw_only=True)
class Limited:
    """What is left for a policy to see, what must stop, and why others wait."""

    snapshot: Snapshot
    stops: tuple[Preempt, ...] = ()
    held: Mapping[str, str] = field(default_factory=dict)  # by job: why


class _Rows:
    """Which rows stay, and up to which value each may choose."""

    def __init__(self, num_jobs: int) -> None:
        self.keeps = np.ones(num_jobs, dtype=bool)
        self.most: dict[int, float] = {}
        self.stops: list[Preempt] = []
        self.held: dict[str, str] = {}


def limit_teams(
    snapshot: Snapshot,
    teams: Sequence[str],
    limits: Mapping[str, TeamLimit],
    values: FloatArray,
) -> Limited:
    """The snapshot as its policy may see it; `teams` has the team of each job, row by row."""
    rows_of: dict[str, list[int]] = {}
    for row, team in enumerate(teams):
        if team in limits:
            rows_of.setdefault(team, []).append(row)
    if not rows_of:
        return Limited(snapshot=snapshot)
    made = _Rows(len(teams))
    for team, rows in rows_of.items():
        limit = limits[team]
        if limit.spent:
            _hold_all(snapshot, rows, limit.spent, made)
        elif limit.quota is not None:
            _share_quota(snapshot, team, rows, limit.quota, values, made)
    return Limited(
        snapshot=_narrowed(snapshot, made, values), stops=tuple(made.stops), held=made.held
    )


def option_values(snapshot: Snapshot, row: int, values: FloatArray) -> FloatArray:
    """What each option of a job takes; infinity where there is no such option."""
    which = snapshot.jobs.option_set[row]
    taken = snapshot.options.counts[which] @ values
    found: FloatArray = np.where(snapshot.options.samples_per_second[which] > 0, taken, np.inf)
    return found


def _hold_all(snapshot: Snapshot, rows: Sequence[int], reason: str, made: _Rows) -> None:
    for row in rows:
        spec = snapshot.jobs.specs[row]
        made.keeps[row] = False
        if snapshot.jobs.option[row] >= 0:
            made.stops.append(Preempt(job_id=spec.id, reason=reason))
        else:
            made.held[spec.id] = reason


def _share_quota(
    snapshot: Snapshot,
    team: str,
    rows: Sequence[int],
    quota: float,
    values: FloatArray,
    made: _Rows,
) -> None:
    jobs = snapshot.jobs
    running = [row for row in rows if jobs.option[row] >= 0]
    has = {row: float(snapshot.counts(row, int(jobs.option[row])) @ values) for row in running}
    room = quota - sum(has.values())
    for row in reversed(running):  # the quota was lowered: the last to come go first
        if room >= -_SLACK:
            break
        room += has.pop(row)
        made.keeps[row] = False
        reason = f"team {team} holds more than its quota of {quota:g}"
        made.stops.append(Preempt(job_id=jobs.specs[row].id, reason=reason))
    is_blocked = False
    for row in rows:
        if jobs.option[row] >= 0:
            continue
        taken = option_values(snapshot, row, values)
        fits = taken[taken <= room + _SLACK]
        if is_blocked or not len(fits):
            made.keeps[row] = False
            held, least = quota - room, float(taken.min(initial=np.inf))
            made.held[jobs.specs[row].id] = _held_sentence(team, held, quota, least)
            # Who comes later must not take the room that this one waits for.
            is_blocked = is_blocked or least <= quota + _SLACK
            continue
        made.most[row] = float(fits.max())
        room -= float(fits.max())
    for row, value in has.items():
        taken = option_values(snapshot, row, values)
        most = float(taken[taken <= value + room + _SLACK].max(initial=value))
        made.most[row] = most
        room -= max(0.0, most - value)


def _held_sentence(team: str, held: float, quota: float, least: float) -> str:
    needs = f"; it needs {least:.3g} at least" if np.isfinite(least) else ""
    return f"team {team} holds or was given {held:.3g} of its quota of {quota:g}{needs}"


def _narrowed(snapshot: Snapshot, made: _Rows, values: FloatArray) -> Snapshot:
    """Without the rows that are held, and for the others without what is too much for them."""
    table, sets = snapshot.options, snapshot.jobs.option_set.copy()
    counts, speeds, memory = [table.counts], [table.samples_per_second], [table.memory_bytes]
    num_sets = len(table.samples_per_second)
    for row, most in made.most.items():
        if not made.keeps[row]:
            continue
        which = int(snapshot.jobs.option_set[row])
        is_allowed = table.counts[which] @ values <= most + _SLACK
        if is_allowed.all():
            continue
        counts.append(table.counts[which][None])
        speeds.append(np.where(is_allowed, table.samples_per_second[which], 0.0)[None])
        memory.append(table.memory_bytes[which][None])
        sets[row] = num_sets
        num_sets += 1
    options = OptionTable(
        counts=np.concatenate(counts),
        samples_per_second=np.concatenate(speeds),
        memory_bytes=np.concatenate(memory),
    )
    jobs = _take(snapshot.jobs, sets, np.flatnonzero(made.keeps))
    return replace(snapshot, jobs=jobs, options=options)


def _take(jobs: JobTable, option_set: np.ndarray, rows: np.ndarray) -> JobTable:
    """Some rows of a table of jobs, with other sets of options."""
    columns: dict[str, object] = {}
    for name in JobTable.__dataclass_fields__:
        column = option_set if name == "option_set" else getattr(jobs, name)
        if isinstance(column, np.ndarray):
            columns[name] = column[rows]
        elif isinstance(column, tuple):
            columns[name] = tuple(column[row] for row in rows.tolist())
        else:
            columns[name] = column
    return JobTable(**columns)  # type: ignore[arg-type]


HALF_LIFE_SECONDS: Final = 24 * 3600.0
_MIN_WEIGHT: Final = 0.125


def type_values(
    snapshot: Snapshot, speeds: FloatArray, dollars_per_hour: Mapping[str, float]
) -> FloatArray:
    """What one GPU of each type counts; the most valuable counts 1."""
    known = np.array([dollars_per_hour.get(gpu, 0.0) for gpu in snapshot.gpu_types])
    if (known > 0).all():
        prices: FloatArray = known / known.max()
        return prices
    counts = snapshot.options.counts[snapshot.jobs.option_set]
    total = counts.sum(axis=2)
    each = speeds / np.maximum(total, 1)
    best = np.stack(
        [
            np.where(counts[:, :, kind] == total, each, 0.0).max(axis=1, initial=0.0)
            for kind in range(len(snapshot.gpu_types))
        ],
        axis=1,
    )
    fastest = best.max(axis=1, initial=0.0, keepdims=True)
    share = np.divide(best, fastest, out=np.zeros_like(best), where=fastest > 0)
    runs = best > 0
    mean = share.sum(axis=0) / np.maximum(runs.sum(axis=0), 1)
    values: FloatArray = np.where(mean > 0, mean, 1.0)
    values /= values.max(initial=1e-300)
    return values


def update_usage(
    snapshot: Snapshot, values: FloatArray, usage: Mapping[str, float], elapsed_seconds: float
) -> dict[str, float]:
    """What each owner used, faded, with what ran since the last decision."""
    fade = 0.5 ** (elapsed_seconds / HALF_LIFE_SECONDS)
    found = {owner: used * fade for owner, used in usage.items()}
    jobs = snapshot.jobs
    for row in np.flatnonzero(jobs.is_running).tolist():
        held = min(elapsed_seconds, snapshot.now_seconds - float(jobs.running_since_seconds[row]))
        amount = float(snapshot.counts(row, int(jobs.option[row])) @ values)
        owner = jobs.specs[row].owner
        found[owner] = found.get(owner, 0.0) + amount * max(held, 0.0)
    return found


def owner_weights(
    snapshot: Snapshot, shares: Mapping[str, float], usage: Mapping[str, float]
) -> FloatArray:
    """What the jobs of each owner weigh, by job. An owner without a stated share has share 1."""
    owners = [spec.owner for spec in snapshot.jobs.specs]
    due = {owner: shares.get(owner, 1.0) for owner in dict.fromkeys(owners)}
    all_due = sum(due.values())
    all_used = sum(usage.get(owner, 0.0) for owner in due)
    weight = {}
    for owner, share in due.items():
        used = usage.get(owner, 0.0) / all_used if all_used > 0 else share / all_due
        weight[owner] = max(2.0 ** (1.0 - used * all_due / share), _MIN_WEIGHT)
    return np.array([weight[owner] for owner in owners])
