"""Curves for TensorBoard, Weights & Biases and MLflow, written by the first rank.

Files stay beside the checkpoints, and nothing is sent anywhere unless the user's own variables
(WANDB_API_KEY, MLFLOW_TRACKING_URI) say so. A job that goes on writes on in the same run.
"""

from __future__ import annotations

import math
import os
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any, Final, Protocol

from drystone.errors import InvalidSpec
from drystone.run.train.config import RankConfig
from drystone.run.train.step_report import StepReport

PACKAGES: Final = {"tensorboard": "tensorboard", "wandb": "wandb", "mlflow": "mlflow"}


class Reporter(Protocol):
    """Takes numbers by step."""

    def write(self, step: int, values: Mapping[str, float]) -> None:
        """The numbers of one step."""

    def close(self) -> None:
        """Nothing more comes."""


def open_reporters(names: str, folder: Path, *, run: str, first_step: int) -> list[Reporter]:
    """What `report` of a job names, as `tensorboard,wandb`; steps before `first_step` are known."""
    makers: dict[str, Any] = {
        "tensorboard": TensorBoardFiles,
        "wandb": WandbRun,
        "mlflow": MlflowRun,
    }
    found: list[Reporter] = []
    for name in filter(None, names.split(",")):
        try:
            found.append(makers[name](folder, run=run, first_step=first_step))
        except ModuleNotFoundError as error:
            raise InvalidSpec(
                f"report: {name} is not installed here ({error.name} is missing)",
                hint=f"pip install {PACKAGES[name]}, or leave it out of report",
            ) from None
    return found


class Curves:
    """Loss, learning rate, gradient norm, tokens/s and memory by step, to all reporters."""

    def __init__(self, reporters: Sequence[Reporter]) -> None:
        self._reporters = list(reporters)

    def write_step(self, report: StepReport) -> None:
        """The numbers of a step; those that are none are left out."""
        values = {
            "train/loss": report.loss,
            "train/learning_rate": report.learning_rate,
            "train/gradient_norm": report.gradient_norm,
            "train/tokens_per_second": report.tokens_per_second,
            "train/peak_memory_bytes": float(max(report.peak_memory_bytes, default=0)),
        }
        self.write(report.step, values)

    def write(self, step: int, values: Mapping[str, float]) -> None:
        """Any numbers of a step."""
        finite = {name: value for name, value in values.items() if math.isfinite(value)}
        for reporter in self._reporters:
            reporter.write(step, finite)

    def close(self) -> None:
        """Nothing more comes."""
        for reporter in self._reporters:
            reporter.close()


def open_curves(config: RankConfig, *, first_step: int) -> Curves:
    """What the job's `report` says, beside its checkpoints."""
    if config.checkpoints is None and config.report:
        raise InvalidSpec("--report needs --checkpoints: its files stand beside them")
    folder = (config.checkpoints or Path()).parent
    run = os.environ.get("DRYSTONE_JOB", "") or "run"
    return Curves(open_reporters(config.report, folder, run=run, first_step=first_step))


class TensorBoardFiles:
    """Event files in `tensorboard/`."""

    def __init__(self, folder: Path, *, run: str, first_step: int) -> None:
        from torch.utils.tensorboard import SummaryWriter

        self._writer = SummaryWriter(str(folder / "tensorboard" / run), purge_step=first_step + 1)

    def write(self, step: int, values: Mapping[str, float]) -> None:
        """One scalar each."""
        for name, value in values.items():
            self._writer.add_scalar(name, value, step)
        self._writer.flush()

    def close(self) -> None:
        """The file is whole."""
        self._writer.close()


class WandbRun:
    """A run of Weights & Biases: offline, unless the user has a key."""

    def __init__(self, folder: Path, *, run: str, first_step: int) -> None:
        import wandb

        # wandb reads both itself; without either it would ask on the terminal.
        has_said = os.environ.get("WANDB_MODE") or os.environ.get("WANDB_API_KEY")
        folder.mkdir(parents=True, exist_ok=True)
        self._run = wandb.init(
            dir=str(folder),
            name=run,
            id=_identity(folder, run),
            resume="allow",
            mode=None if has_said else "offline",
        )

    def write(self, step: int, values: Mapping[str, float]) -> None:
        """One row."""
        self._run.log(dict(values), step=step)

    def close(self) -> None:
        """The run is over, or goes on later under the same name."""
        self._run.finish()


class MlflowRun:
    """A run of MLflow, in `mlflow/` unless MLFLOW_TRACKING_URI names a server."""

    def __init__(self, folder: Path, *, run: str, first_step: int) -> None:
        from mlflow.tracking import MlflowClient

        store = os.environ.get("MLFLOW_TRACKING_URI") or f"sqlite:///{folder / 'mlflow.db'}"
        folder.mkdir(parents=True, exist_ok=True)
        self._client = MlflowClient(tracking_uri=store)
        found = self._client.get_experiment_by_name("drystone")
        experiment = found.experiment_id if found else self._client.create_experiment("drystone")
        known = folder / "mlflow-run.txt"
        if not known.is_file():
            made = self._client.create_run(experiment, run_name=run)
            known.write_text(made.info.run_id, encoding="utf-8")
        self._run_id = known.read_text(encoding="utf-8").strip()

    def write(self, step: int, values: Mapping[str, float]) -> None:
        """One metric each."""
        for name, value in values.items():
            self._client.log_metric(self._run_id, name.replace("/", "."), value, step=step)

    def close(self) -> None:
        """The run is over for now."""
        self._client.set_terminated(self._run_id)


def _identity(folder: Path, run: str) -> str:
    """The same for every launch of a job."""
    import hashlib

    return hashlib.sha256(f"{folder.resolve()} {run}".encode()).hexdigest()[:16]
