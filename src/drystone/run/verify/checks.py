"""Checks of `drystone verify`: collectives, every kind of plan, memory and speed, a kill, a resize.

Training is compared with the same model on one device. Each check says what was expected, what was
found, and what to try. The same code runs on GPUs and on a processor that emulates them.
"""

from __future__ import annotations

import json
import math
import signal
import statistics
import subprocess
import sys
import time
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import asdict, dataclass, replace
from enum import StrEnum
from pathlib import Path
from typing import Any, Final

from drystone.describe.model import ModelSpec
from drystone.describe.pool import Pool
from drystone.describe.recipe import Precision, Recipe
from drystone.plan.plan import Plan, save_plan
from drystone.run.verify.plans import (
    ON_GPU,
    ON_PROCESSOR,
    SEED,
    every_kind_of_plan,
    plan_alone,
    recipe_for,
    small_model,
)
from drystone.run.verify.ranks import (
    Devices,
    Ended,
    losses_of,
    rank_gpus,
    read_reports,
    run_ranks,
)

NUM_STEPS: Final = 6
_TRAIN: Final = "drystone.run.train"
_TRY_NCCL: Final = "Run again with NCCL_DEBUG=INFO and look for the first WARN"
# Of losses: fp32 differs by the order of sums, 16 bit by rounding.
_TOLERANCE: Final = {Precision.FP32: 1e-4, Precision.TF32: 5e-3}
_TOLERANCE_16_BIT: Final = 3e-2
_NEAR: Final = 0.25  # estimates of memory and speed that are off by more are reported as wrong


class Outcome(StrEnum):
    """How a check went."""

    PASSED = "passed"
    FAILED = "failed"
    LEFT_OUT = "left out"


@dataclass(frozen=True, slots=True, kw_only=True)
class Check:
    """One check, for people and for an issue report."""

    name: str
    outcome: Outcome
    detail: str
    hint: str = ""
    seconds: float = 0.0

    def to_json(self) -> dict[str, Any]:
        """As it stands in the report."""
        return asdict(self) | {"outcome": self.outcome.value}


@dataclass(frozen=True, slots=True, kw_only=True)
class Trial:
    """What is verified, where, and in which folder."""

    pool: Pool
    devices: Devices
    folder: Path
    is_quick: bool = False

    @property
    def models(self) -> tuple[ModelSpec, ...]:
        """One with a head of its own and, unless it must be quick, one that shares its weights."""
        scale = ON_PROCESSOR if self.devices.is_emulated else ON_GPU
        tied = (False,) if self.is_quick else (False, True)
        return tuple(small_model(scale, is_tied=is_tied) for is_tied in tied)

    @property
    def recipe(self) -> Recipe:
        """How the models are trained."""
        scale = ON_PROCESSOR if self.devices.is_emulated else ON_GPU
        return recipe_for(scale, self.pool, is_emulated=self.devices.is_emulated)

    @property
    def tolerance(self) -> float:
        """Of losses, relative."""
        return _TOLERANCE.get(self.recipe.precision, _TOLERANCE_16_BIT)


def verify(trial: Trial) -> Iterator[Check]:
    """All checks, one after the other, each as soon as it is known."""
    yield _timed(time.monotonic(), _devices_check(trial))
    for model in trial.models:
        yield from _plan_checks(trial, model)
    yield from _disturbance_checks(trial, trial.models[0])


def describe_software() -> dict[str, Any]:
    """Versions and devices as torch sees them, asked in a process of its own."""
    told = subprocess.run(
        [sys.executable, "-P", "-m", f"{_TRAIN}.verify", ".", "--devices"],
        capture_output=True,
        text=True,
        check=False,
    )
    if told.returncode:
        lines = told.stderr.strip().splitlines()
        return {"error": lines[-1] if lines else f"exit code {told.returncode}"}
    found: dict[str, Any] = json.loads(told.stdout.splitlines()[-1])
    return found


def _devices_check(trial: Trial) -> Check:
    """Whether torch sees what the driver says."""
    found = describe_software()
    if "error" in found:
        return Check(name="devices", outcome=Outcome.FAILED, detail=found["error"],
                     hint="pip install 'drystone[runtime]'")  # fmt: skip
    if trial.devices.is_emulated:
        detail = f"{trial.pool} emulated on the processor, torch {found['torch']}"
        return Check(name="devices", outcome=Outcome.PASSED, detail=detail)
    seen, wanted = len(found["devices"]), trial.pool.num_gpus
    detail = f"torch {found['torch']} for CUDA {found['cuda']} sees {seen} GPUs, {trial.pool} here"
    hint = "Install a torch for this driver; look at nvidia-smi and CUDA_VISIBLE_DEVICES"
    outcome = Outcome.PASSED if seen >= wanted else Outcome.FAILED
    return Check(name="devices", outcome=outcome, detail=detail, hint=hint if seen < wanted else "")


# --- every kind of plan --------------------------------------------------------------------------


def _plan_checks(trial: Trial, model: ModelSpec) -> Iterator[Check]:
    """Train a few steps by every kind of plan, and compare the losses with one device."""
    folder = trial.folder / model.name
    alone = {"one device": plan_alone(model, trial.recipe, trial.pool)}
    began = time.monotonic()
    ended = _run_plans(trial, folder / "alone", alone)
    expected = _losses(folder / "alone", 0)
    yield _timed(began, _reference_check(model, expected, ended["one device"]))
    if len(expected) < NUM_STEPS or trial.pool.num_gpus < 2:
        return
    plans = every_kind_of_plan(model, trial.recipe, trial.pool)
    batches: dict[tuple[str, ...], dict[str, Plan]] = {}
    for name, plan in plans.items():
        batches.setdefault(rank_gpus(plan), {})[name] = plan
    for number, some in enumerate(batches.values()):
        where = folder / f"plans-{number}"
        began = time.monotonic()
        ended = _run_plans(trial, where, some)
        seconds = (time.monotonic() - began) / max(len(some), 1)
        yield replace(_collectives_check(where, model), seconds=0.0)
        for index, (name, plan) in enumerate(some.items()):
            reports = read_reports(_plan_file(where, index).with_suffix(".reports"))
            label = f"{model.name}: {name}"
            check = _loss_check(trial, label, expected, reports, ended[name])
            yield replace(check, seconds=seconds)
            if check.outcome is Outcome.PASSED:
                yield from _estimate_checks(trial, label, plan, reports)


def _run_plans(trial: Trial, folder: Path, plans: Mapping[str, Plan]) -> dict[str, Ended]:
    """Execute them in one set of processes; when those die, in new ones from the next plan on."""
    folder.mkdir(parents=True, exist_ok=True)
    for index, plan in enumerate(plans.values()):
        save_plan(plan, _plan_file(folder, index))
    gpus = rank_gpus(next(iter(plans.values())))
    arguments = [f"{_TRAIN}.verify", str(folder), f"--steps={NUM_STEPS}", f"--seed={SEED}"]
    results: dict[str, Ended] = {}
    while len(results) < len(plans):
        logs = folder / f"logs-{len(results)}"
        ended = run_ranks(arguments, gpus, trial.devices, logs)
        reached = 0
        for index, name in enumerate(plans):
            if name in results or not _plan_file(folder, index).with_suffix(".reports").exists():
                continue
            results[name] = ended  # of all that were reached, only the last can have failed
            reached += 1
            done = _losses(folder, index)
            if len(done) == NUM_STEPS:
                results[name] = Ended(exit_codes=(0,), is_hung=False, message="")
        if not reached:  # they died before the first plan: so they would again
            return {name: results.get(name, ended) for name in plans}
    return results


def _plan_file(folder: Path, index: int) -> Path:
    return folder / f"{index:03d}.plan"


def _losses(folder: Path, index: int) -> dict[int, float]:
    return losses_of(read_reports(_plan_file(folder, index).with_suffix(".reports")))


def _reference_check(model: ModelSpec, losses: Mapping[int, float], ended: Ended) -> Check:
    is_right = len(losses) == NUM_STEPS and all(math.isfinite(loss) for loss in losses.values())
    detail = "losses " + ", ".join(f"{loss:.4f}" for loss in losses.values())
    return Check(
        name=f"{model.name}: one device",
        outcome=Outcome.PASSED if is_right else Outcome.FAILED,
        detail=detail if is_right else _told(ended),
    )


def _collectives_check(folder: Path, model: ModelSpec) -> Check:
    path = folder / "collectives.json"
    name = f"{model.name}: collectives"
    if not path.exists():
        detail = "they did not end"
        return Check(name=name, outcome=Outcome.FAILED, detail=detail, hint=_TRY_NCCL)
    found: dict[str, list[str]] = json.loads(path.read_text(encoding="utf-8"))
    wrong = [f"{what} in {kind}" for kind, whats in found.items() for what in whats]
    if wrong:
        detail = "wrong results: " + ", ".join(wrong)
        return Check(name=name, outcome=Outcome.FAILED, detail=detail, hint=_TRY_NCCL)
    detail = f"equal, unequal and empty pieces in {', '.join(found)}"
    return Check(name=name, outcome=Outcome.PASSED, detail=detail)


def _loss_check(
    trial: Trial,
    name: str,
    expected: Mapping[int, float],
    reports: Sequence[Mapping[str, Any]],
    ended: Ended,
) -> Check:
    losses = losses_of(reports)
    if len(losses) < len(expected):
        return Check(name=name, outcome=Outcome.FAILED, detail=_told(ended), hint=_TRY_NCCL)
    worst = max(abs(losses[step] - loss) / abs(loss) for step, loss in expected.items())
    is_right = worst <= trial.tolerance
    detail = f"losses differ from one device's by {worst:.1e} at most (allowed {trial.tolerance:g})"
    return Check(name=name, outcome=Outcome.PASSED if is_right else Outcome.FAILED, detail=detail)


def _told(ended: Ended) -> str:
    if ended.is_hung:
        return "it hung: no sign of life for three minutes" + (
            f"; {ended.message}" if ended.message else ""
        )
    return ended.message or f"exit codes {', '.join(str(code) for code in ended.exit_codes)}"


# --- estimates against measurements --------------------------------------------------------------


def _estimate_checks(
    trial: Trial, name: str, plan: Plan, reports: Sequence[Mapping[str, Any]]
) -> Iterator[Check]:
    """Memory and speed as measured; on a processor both would measure the processor."""
    if trial.devices.is_emulated:
        return
    steps = [report for report in reports if report.get("event") == "step"]
    peak = max(max(report["peak_memory_bytes"]) for report in steps)
    need = max(need.required_bytes for need in plan.needs)
    yield _ratio_check(f"{name}: memory", peak, need, "GB", 1e9)
    seconds = statistics.median(float(report["step_seconds"]) for report in steps[2:])
    yield _ratio_check(f"{name}: step", seconds, plan.step_seconds, "s", 1.0)


def _ratio_check(name: str, measured: float, estimated: float, unit: str, scale: float) -> Check:
    ratio = measured / estimated
    detail = f"{measured / scale:.3g} {unit} measured, {estimated / scale:.3g} estimated"
    is_near = abs(math.log(ratio)) <= math.log(1 + _NEAR)
    return Check(
        name=name,
        outcome=Outcome.PASSED if is_near else Outcome.FAILED,
        detail=f"{detail} ({ratio:.2f}x)",
        hint="" if is_near else "drystone profile --out profile.json, then plan with --profile",
    )


# --- a killed rank, and fewer ranks --------------------------------------------------------------


def _disturbance_checks(trial: Trial, model: ModelSpec) -> Iterator[Check]:
    """Kill a rank between two checkpoints, go on; then go on with fewer ranks."""
    folder = trial.folder / "disturbed"
    expected = _losses(trial.folder / model.name / "alone", 0)
    if len(expected) < NUM_STEPS:
        return
    if trial.pool.num_gpus < 2:
        yield Check(name="kill and resize", outcome=Outcome.LEFT_OUT, detail="takes two devices")
        return
    plans = every_kind_of_plan(model, trial.recipe, trial.pool)
    whole = next(iter(plans.values()))
    began = time.monotonic()
    killed = _train(trial, whole, folder / "killed", kills_after=3)
    went_on = _train(trial, whole, folder / "again", num_steps=NUM_STEPS - 1)
    yield _timed(began, _kill_check(trial, folder, expected, killed, went_on))
    began = time.monotonic()
    smaller = plan_alone(model, trial.recipe, trial.pool)
    resized = _train(trial, smaller, folder / "resized")
    reports = read_reports(folder / "resized" / "rank-0.out")
    last = {step: loss for step, loss in expected.items() if step == NUM_STEPS}
    check = _loss_check(trial, "resize", last, reports, resized)
    words = f"from {whole.num_gpus} ranks to 1 at step {NUM_STEPS - 1}: {check.detail}"
    yield _timed(began, replace(check, detail=words))


def _train(
    trial: Trial, plan: Plan, logs: Path, *, num_steps: int = NUM_STEPS, kills_after: int = 0
) -> Ended:
    """Train with checkpoints; with `kills_after`, kill the last rank once that step is done."""
    logs.mkdir(parents=True, exist_ok=True)
    save_plan(plan, logs / "plan.json")

    def kill(processes: list[subprocess.Popen[bytes]]) -> None:
        done = losses_of(read_reports(logs / "rank-0.out"))
        if kills_after and kills_after in done and processes[-1].poll() is None:
            processes[-1].send_signal(signal.SIGKILL)

    arguments = [
        _TRAIN,
        str(logs / "plan.json"),
        f"--steps={num_steps}",
        f"--seed={SEED}",
        f"--checkpoints={trial.folder / 'disturbed' / 'checkpoints'}",
        "--checkpoint-every=2",
        "--wait-for-saves",
        "--timeout=60",
    ]
    return run_ranks(arguments, rank_gpus(plan), trial.devices, logs, watch=kill)


def _kill_check(
    trial: Trial, folder: Path, expected: Mapping[int, float], killed: Ended, went_on: Ended
) -> Check:
    reports = read_reports(folder / "again" / "rank-0.out")
    started = [report["step"] for report in reports if report.get("event") == "started"]
    if killed.is_well:
        detail = "all ranks ended well although one was killed"
        return Check(name="kill a rank", outcome=Outcome.FAILED, detail=detail)
    if not started or started[0] < 2:
        detail = f"it did not go on from its checkpoint: {_told(went_on)}"
        return Check(name="kill a rank", outcome=Outcome.FAILED, detail=detail)
    rest = {step: loss for step, loss in expected.items() if started[0] < step < NUM_STEPS}
    check = _loss_check(trial, "kill a rank", rest, reports, went_on)
    return replace(check, detail=f"went on at step {started[0]}: {check.detail}")


def _timed(began: float, check: Check) -> Check:
    return replace(check, seconds=time.monotonic() - began)
