"""A look at the data of a job before it is taken in: in a process of its own, which has torch.

What cannot be trained on is refused with its place; the samples of an epoch are counted. Text and
records are tokenised on the way, and kept where the ranks find them.
"""

from __future__ import annotations

import json
import os
import subprocess
import sys
from dataclasses import replace
from importlib.util import find_spec
from pathlib import Path
from typing import Any, Final

from drystone.describe.job import Shape, TrainingJob, sequence_length
from drystone.describe.model import ModelSpec
from drystone.errors import InvalidSpec, RequestError, UnreadableFile
from drystone.run.engines.agent.environment import job_environment

LIMIT_BYTES: Final = 1 << 28  # of text and records that are tokenised while somebody waits
_EPOCH_LIMIT_BYTES: Final = 1 << 31
_TIMEOUT_SECONDS: Final = 1800.0


def look_at_data(job: TrainingJob, shape: Shape | None) -> TrainingJob:
    """The job with the number of its samples; raises where its data cannot be trained on."""
    _check_reports(job)
    if job.is_command or job.data == "synthetic" or shape is None:
        return job
    if not Path(job.data).exists():
        raise UnreadableFile("is not there", where=job.data[:300])
    if find_spec("torch") is None:  # what is wrong is told by the ranks
        return job
    answer = _ask(job, shape, job.data)
    if job.train.eval_data:
        if not Path(job.train.eval_data).exists():
            raise UnreadableFile("is not there", where=job.train.eval_data[:300])
        _ask(job, shape, job.train.eval_data)
    if job.num_epochs and not answer["num_samples"]:
        raise InvalidSpec(
            f"{answer['num_bytes'] / 1e9:.0f} GB are too much to count the samples of an epoch",
            where=job.data[:300],
            hint="Write train: {tokens: ...} or {steps: ...} instead of epochs",
        )
    return replace(job, num_rows=answer["num_samples"])


def _check_reports(job: TrainingJob) -> None:
    """What `report` names must be installed."""
    for name in filter(None, job.train.report.split(",")):
        if find_spec(name) is None:
            raise InvalidSpec(
                f"report: {name} is not installed here",
                hint=f"pip install {name}, or leave it out of report",
            )


def _ask(job: TrainingJob, shape: Shape, name: str) -> dict[str, Any]:
    is_module = not isinstance(shape, ModelSpec)
    request = {
        "name": name,
        "seq_len": sequence_length(job, shape),
        "vocab_size": shape.vocab_size,
        "seed": job.train.seed,
        "format": job.train.data_format,
        "column": job.train.column,
        "tokenizer": job.train.tokenizer,
        "model": shape.source if isinstance(shape, ModelSpec) else "",
        "is_packed": job.train.pack,
        "is_plain": is_module,
        "limit_bytes": _EPOCH_LIMIT_BYTES if job.num_epochs else LIMIT_BYTES,
    }
    command = [sys.executable, "-P", "-m", "drystone.run.train.data.look", json.dumps(request)]
    paths = [str(Path(__file__).resolve().parents[2]), os.environ.get("PYTHONPATH", "")]
    variables = job_environment(os.environ) | {"PYTHONPATH": os.pathsep.join(filter(None, paths))}
    try:
        done = subprocess.run(
            command, env=variables, capture_output=True, text=True, timeout=_TIMEOUT_SECONDS
        )
        answer: dict[str, Any] = json.loads(done.stdout)
    except subprocess.TimeoutExpired:
        raise InvalidSpec("took too long to look at", where=name[:300]) from None
    except ValueError:
        reason = (done.stderr.strip() or "no reason given").splitlines()[-1][:300]
        raise InvalidSpec(f"could not be looked at: {reason}", where=name[:300]) from None
    if "error" in answer:
        raise RequestError(**answer["error"])
    return answer
