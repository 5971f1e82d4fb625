"""Trials at the launch: plans that the estimate cannot tell apart, each for a few steps.

The ranks are up and stay up: each plan is built, takes some steps on the data of the job, and is
forgotten; the fastest is trained from where the job is. Nothing of a trial is saved.
"""

from __future__ import annotations

import gc
import os
import statistics
from dataclasses import replace
from pathlib import Path
from typing import Final, NamedTuple, TextIO

import torch
import torch.distributed as dist

from drystone.plan.plan import Plan, load_plan
from drystone.plan.rivals import plan_words
from drystone.run.train.collectives import Wire
from drystone.run.train.config import RankConfig
from drystone.run.train.data import open_source
from drystone.run.train.emulate import VARIABLE, rank_gpus, read_emulation
from drystone.run.train.loop import data_request, prepared
from drystone.run.train.step_report import write_event

TRIAL_STEPS: Final = 7  # of each plan
_SETTLING_STEPS: Final = 3  # of those: they allocate, and emulated devices measure what they cost


class Candidate(NamedTuple):
    """A plan, and what emulated devices are told under it."""

    plan: Plan
    emulation: str


def keep_fastest(
    plan: Plan, rivals: Path, config: RankConfig, wire: Wire, stream: TextIO
) -> Candidate:
    """The plan, or the rival of that folder whose steps take least."""
    mine = Candidate(plan, os.environ.get(VARIABLE, ""))
    candidates = [mine, *(one for one in _read(rivals) if rank_gpus(one.plan) == rank_gpus(plan))]
    chance = torch.get_rng_state()
    seconds = [_try(candidate, config, wire) for candidate in candidates]
    torch.set_rng_state(chance)
    best = candidates[seconds.index(min(seconds))]
    if wire.rank == 0:
        trials = [
            [plan_words(candidate.plan), candidate.plan.step_seconds, measured]
            for candidate, measured in zip(candidates, seconds, strict=True)
        ]
        write_event(stream, "tried", step=0, kept=plan_words(best.plan), trials=trials)
    return best


def _read(folder: Path) -> list[Candidate]:
    found = []
    for path in sorted(folder.glob("*.json")):
        pace = path.with_suffix(".emulate")
        told = pace.read_text(encoding="utf-8") if pace.exists() else ""
        found.append(Candidate(load_plan(path), told))
    return found


def _try(candidate: Candidate, config: RankConfig, wire: Wire) -> float:
    """Seconds of a step, the median of a few, on the rank where that is longest."""
    plan = candidate.plan
    quiet = replace(config, checkpoints=None, num_steps=TRIAL_STEPS)
    source = open_source(data_request(plan, config, config.data))
    emulation = read_emulation(candidate.emulation, plan)
    with prepared(plan, emulation, quiet, wire) as trainer:
        steps = trainer.iterate(source.read, num_steps=TRIAL_STEPS)
        seconds = [trainer.step(batches).step_seconds for batches in steps]
        del trainer, steps
    gc.collect()  # engines hold themselves in circles
    if torch.cuda.is_available():
        torch.cuda.empty_cache()
        torch.cuda.reset_peak_memory_stats()  # what is reported later is the training's own
    found: list[float] = [0.0] * wire.num_ranks
    dist.all_gather_object(found, statistics.median(seconds[_SETTLING_STEPS:]), group=wire.group)
    return max(found)
