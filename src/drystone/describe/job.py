"""What a training job asks for: how much work, by when, for how much, on which GPUs."""

from __future__ import annotations

import math
import operator
from collections.abc import Iterable
from dataclasses import Field, dataclass, field, fields, replace
from pathlib import Path
from types import MappingProxyType
from typing import Any, Final, Literal

from drystone.describe.files.amounts import parse_span
from drystone.describe.gpu import GpuSpec
from drystone.describe.model import ModelSpec, ModuleSpec
from drystone.describe.model_source import ModuleReference, resolve_model
from drystone.describe.patience import JobPatience
from drystone.describe.recipe import Lora, Optimizer, Precision, Recipe, Tuning, auto_precision
from drystone.errors import InvalidSpec, UnreadableFile, reason_of


@dataclass(frozen=True, slots=True, kw_only=True)
class JobSpec:
    """One job as it was submitted. Nothing in it changes while the job waits or runs."""

    id: str
    submit_seconds: float
    model: str
    total_samples: float
    global_batch: int = 1
    seq_len: int = 0  # tokens of a sample; 0: not stated
    tuning: str = "full"  # how it is trained: full, lora or qlora
    owner: str = ""
    priority: float = 1.0  # a weight: 2 counts for two jobs of weight 1
    deadline_seconds: float = math.inf
    max_cost_dollars: float = math.inf
    max_duration_seconds: float = math.inf  # of running, all attempts together
    allowed_gpus: frozenset[str] = frozenset()  # empty: any type
    denied_gpus: tuple[str, ...] = ()
    min_gpus: int = 1
    max_gpus: int = 1_000_000
    requested_gpu: str = ""  # what its owner named, for policies that change nothing
    requested_count: int = 0
    startup_seconds: float = -1.0  # without progress after every start; -1: as the cluster says

    def __post_init__(self) -> None:
        object.__setattr__(self, "denied_gpus", tuple(self.denied_gpus))  # JSON knows only lists
        problem = self._problem()
        if problem:
            raise InvalidSpec(f"job {self.id!r}: {problem}")

    def _problem(self) -> str:
        if not self.id:
            return "the id is empty"
        if not (math.isfinite(self.submit_seconds) and self.submit_seconds >= 0):
            return f"submit_seconds is {self.submit_seconds}, must be 0 or more"
        if not (math.isfinite(self.total_samples) and self.total_samples > 0):
            return f"total_samples is {self.total_samples}, must be above 0"
        if not (math.isfinite(self.priority) and self.priority > 0):
            return f"priority is {self.priority}, must be above 0"
        if not 1 <= self.min_gpus <= self.max_gpus:
            return f"min_gpus {self.min_gpus} and max_gpus {self.max_gpus} leave nothing"
        if not (self.max_cost_dollars > 0 and self.max_duration_seconds > 0):
            return "max_cost_dollars and max_duration_seconds must be above 0"
        both = sorted(self.allowed_gpus.intersection(self.denied_gpus))
        if both:
            return f"{both[0]} is both allowed and denied"
        if self.seq_len < 0 or self.global_batch < 1:
            return f"seq_len {self.seq_len} or global_batch {self.global_batch} is too small"
        return ""

    @property
    def is_limited(self) -> bool:
        """Whether its owner limits types, numbers, money or time."""
        return (
            self.max_cost_dollars != math.inf
            or self.max_duration_seconds != math.inf
            or bool(self.allowed_gpus)
            or bool(self.denied_gpus)
            or self.min_gpus > 1
            or self.max_gpus < 1_000_000
        )

    def names(self, gpu: str) -> bool:
        """Whether the job may run on this type."""
        return (not self.allowed_gpus or gpu in self.allowed_gpus) and gpu not in self.denied_gpus

    def allows(self, gpu: str, count: int) -> bool:
        """Whether the job may run on `count` GPUs in all, some of this type."""
        return self.names(gpu) and self.min_gpus <= count <= self.max_gpus


_LONGEST_DEFAULT: Final = 4096
_TOKEN_BYTES: Final = MappingProxyType({".bin": 2, ".u16": 2, ".u32": 4, ".txt": 1})


def option(
    default: Any,
    told: str,
    *,
    flag: str = "",
    section: str = "train",
    key: str = "",
    is_count: bool = False,
    is_span: bool = False,
    **limits: float,
) -> Any:
    """A field of a configuration: its default, its documentation, and what values it may have.

    `section` and `key` say where it stands in a job file, where that is not its own name in
    `train`; what is of the optimizer may stand in `train` too. `flag` names it on the command line
    of a rank. A count may be written like 500M in a file, a span like 100 or 3%. Limits are named
    as pydantic names them: gt, ge, le.
    """
    metadata = {
        "told": told,
        "flag": flag,
        "section": section,
        "key": key,
        "is_count": is_count,
        "is_span": is_span,
        "limits": limits,
    }
    return field(default=default, metadata=metadata)


@dataclass(frozen=True, slots=True, kw_only=True)
class TrainConfig:
    """How to train, where a plan leaves it open: one object from the job file to every rank.

    Each field is a key of a job file and a flag of `python -m drystone.run.train`; nothing else has
    to be written for a new one but its use.
    """

    learning_rate: float = option(
        3e-4, "the highest of the schedule", flag="lr", section="optimizer", gt=0, le=1e12
    )
    schedule: Literal["constant", "linear", "cosine", "wsd"] = option(
        "constant",
        "how the learning rate falls after the warm-up; wsd: at the end only",
        section="optimizer",
    )
    warmup: str = option(
        "0", "steps, or a share, in which it rises from 0", section="optimizer", is_span=True
    )
    decay: str = option(
        "20%", "of wsd: the last steps, or their share", section="optimizer", is_span=True
    )
    floor: float = option(
        0.0, "share of the learning rate that is left at the end", section="optimizer", ge=0, le=1
    )
    beta1: float = option(0.9, "of adam", section="optimizer", ge=0, le=0.999999)
    beta2: float = option(0.999, "of adam", section="optimizer", ge=0, le=0.999999)
    epsilon: float = option(1e-8, "of adam", section="optimizer", gt=0, le=1)
    weight_decay: float = option(
        0.1, "of matrices; vectors have none", section="optimizer", ge=0, le=1e6
    )
    clip: float = option(
        1.0, "largest norm of the gradient; 0: any", section="optimizer", ge=0, le=1e12
    )
    data_format: Literal["auto", "text", "chat", "prompt", "tokens"] = option(
        "auto",
        "what a record is: text, messages, prompt and completion, or token numbers",
        section="data",
        key="format",
    )
    pack: bool = option(
        False, "several documents in a row, which do not see each other", section="data"
    )
    column: str = option(
        "", "of records that holds it; left out: by its usual name", section="data"
    )
    tokenizer: str = option(
        "", "tokenizer.json or its folder; left out: the one beside the model", section="data"
    )
    eval_data: str = option("", "held-out data, of the same kind", section="data", key="eval")
    evaluate_every: int = option(
        0,
        "steps; left out: only after the last one",
        section="evaluate",
        key="every",
        is_count=True,
        ge=0,
    )
    keep_best: bool = option(
        False, "keep the checkpoint of the lowest evaluation, and export it", section="evaluate"
    )
    stop_after: int = option(
        0,
        "end after so many evaluations without a lower one; left out: never",
        section="evaluate",
        is_count=True,
        ge=0,
    )
    evaluate_samples: int = option(
        0,
        "of the held-out data, the first so many; left out: all",
        section="evaluate",
        key="samples",
        is_count=True,
        ge=0,
    )
    report: str = option("", "tensorboard, wandb, mlflow", section="report")
    on_bad_loss: Literal["stop", "skip"] = option(
        "stop", "when a loss or gradient is not a number: stop the job, or pass over the step"
    )
    seed: int = option(0, "of weights and data", ge=0, le=2**31 - 1)
    checkpoint_every: int = option(
        0, "steps; left out: by what a save costs and how often machines fail", is_count=True, ge=0
    )
    export: Literal["none", "huggingface", "peft"] = option(
        "none", "at the end, for transformers, or the adapter alone; beside the checkpoints"
    )

    def __post_init__(self) -> None:
        for option in fields(self):
            value, limits = getattr(self, option.name), option.metadata["limits"]
            problems = [
                f"must be {word} {limits[kind]:g}"
                for kind, word, is_within in _LIMITS
                if kind in limits and not is_within(value, limits[kind])
            ]
            if problems:
                raise InvalidSpec(f"{option.name} is {value}, {problems[0]}")
            if option.metadata["is_span"]:
                parse_span(value)

    def arguments(self) -> list[str]:
        """The flags that make a rank read this back."""
        return [
            word for option in fields(self) for word in _words(option, getattr(self, option.name))
        ]


_LIMITS: Final = (
    ("gt", "above", operator.gt),
    ("ge", "at least", operator.ge),
    ("le", "at most", operator.le),
)


def flag_of(option: Field[Any]) -> str:
    """`--weight-decay`: what an option is called on the command line of a rank."""
    return "--" + (option.metadata["flag"] or option.name).replace("_", "-")


def _words(option: Field[Any], value: Any) -> list[str]:
    if value is None or isinstance(value, bool):
        return [flag_of(option)] if value else []
    return [flag_of(option), str(value)]


@dataclass(frozen=True, slots=True, kw_only=True)
class TrainingJob:
    """Nothing in it names hardware that must be used. Steps, tokens or epochs: one is above 0."""

    name: str
    owner: str = ""
    team: str = ""  # whose quota and budget it uses; empty: nobody's
    model: str = ""  # empty: a command whose model nobody told us
    module: ModuleSpec | None = None  # what a look at a Python function told
    data: str = "synthetic"
    num_rows: int = 0  # samples in an epoch, where somebody has looked at the data
    num_steps: int = 0
    num_tokens: int = 0
    num_epochs: float = 0.0
    global_batch: int = 256
    seq_len: int = 0  # 0: the model's context, at most 4096
    precision: str = "auto"
    optimizer: str = "adam"
    tuning: str = "full"
    lora: Lora = field(default_factory=Lora)
    is_compiled: bool = False  # its blocks, by torch.compile
    from_scratch: bool = False  # weights beside the config are left alone
    train: TrainConfig = field(default_factory=TrainConfig)
    priority: float = 1.0
    deadline_after_seconds: float | None = None  # from submission on
    deadline_at_seconds: float | None = None  # since 1970
    max_cost_dollars: float | None = None
    max_duration_seconds: float | None = None  # of running, all attempts together
    allowed_gpus: tuple[str, ...] = ()  # empty: any
    denied_gpus: tuple[str, ...] = ()
    min_gpus: int = 1
    max_gpus: int = 1_000_000
    command: tuple[str, ...] = ()  # empty: Drystone's own runtime
    environment: tuple[tuple[str, str], ...] = ()
    folder: str = ""  # where a command starts
    patience: JobPatience = field(default_factory=JobPatience)

    @property
    def is_command(self) -> bool:
        """Whether a script of its owner trains."""
        return bool(self.command)


Shape = ModelSpec | ModuleSpec


def find_shape(job: TrainingJob) -> Shape | None:
    """The shape of the model; None for a command that names none."""
    if job.module is not None or not job.model:
        return job.module
    found = resolve_model(job.model)
    if isinstance(found, ModuleReference):
        raise InvalidSpec("nobody has looked at this function yet", where=job.model)
    return replace(found, weights="") if job.from_scratch else found


def find_module(job: TrainingJob) -> ModuleReference | None:
    """The Python function that a job names as its model, if nobody has looked at it yet."""
    if job.module is not None or ".py:" not in job.model:
        return None
    found = resolve_model(job.model)
    return found if isinstance(found, ModuleReference) else None


def recipe_of(
    job: TrainingJob, shape: Shape | None, gpus: Iterable[GpuSpec], *, is_emulated: bool = False
) -> Recipe:
    """How it is trained on whichever of these GPUs it gets."""
    chosen = auto_precision(gpus, is_emulated=is_emulated)
    return Recipe(
        seq_len=sequence_length(job, shape),
        global_batch=job.global_batch,
        precision=chosen if job.precision == "auto" else Precision(job.precision),
        optimizer=Optimizer(job.optimizer),
        tuning=Tuning(job.tuning),
        lora=job.lora,
        compiled=job.is_compiled,
    )


def sequence_length(job: TrainingJob, shape: Shape | None) -> int:
    """Tokens of a sample."""
    if job.seq_len:
        return job.seq_len
    context = shape.context_length if shape is not None else 0
    return min(context or _LONGEST_DEFAULT, _LONGEST_DEFAULT)


def count_steps(job: TrainingJob, shape: Shape | None) -> int:
    """Optimizer steps that the job asks for, rounded up."""
    if job.num_steps:
        return job.num_steps
    if job.num_epochs and job.num_rows:
        return max(1, math.ceil(job.num_epochs * job.num_rows / job.global_batch))
    step_tokens = job.global_batch * sequence_length(job, shape)
    tokens = job.num_tokens or job.num_epochs * _file_tokens(job.data)
    return max(1, math.ceil(tokens / step_tokens))


def make_spec(
    job: TrainingJob, shape: Shape | None, *, job_id: str, submit_seconds: float
) -> JobSpec:
    """The job as the scheduler sees it.

    It refuses what cannot end within its money or time. Of a script nobody knows how long it takes,
    so its limits only count while it runs.
    """
    deadline = most_dollars = most_seconds = math.inf
    if shape is not None:
        most_dollars = math.inf if job.max_cost_dollars is None else job.max_cost_dollars
        most_seconds = math.inf if job.max_duration_seconds is None else job.max_duration_seconds
    if job.deadline_after_seconds is not None:
        deadline = submit_seconds + job.deadline_after_seconds
    elif job.deadline_at_seconds is not None:
        deadline = job.deadline_at_seconds
    return JobSpec(
        id=job_id,
        submit_seconds=submit_seconds,
        model=job.model or job.name,
        total_samples=float(count_steps(job, shape) * job.global_batch),
        global_batch=job.global_batch,
        tuning=job.tuning,
        owner=job.owner,
        priority=job.priority,
        deadline_seconds=deadline,
        max_cost_dollars=most_dollars,
        max_duration_seconds=most_seconds,
        allowed_gpus=frozenset(job.allowed_gpus),
        denied_gpus=job.denied_gpus,
        min_gpus=job.min_gpus,
        max_gpus=job.max_gpus,
    )


def _file_tokens(data: str) -> float:
    path = Path(data)
    try:
        size = path.stat().st_size
    except (OSError, ValueError) as error:
        raise UnreadableFile(f"cannot be read: {reason_of(error)}", where=data[:300]) from None
    if path.suffix not in _TOKEN_BYTES or path.is_dir():
        raise InvalidSpec(
            "nobody has counted its samples",
            where=data[:300],
            hint="Write train: {steps: ...}, or submit it where torch is installed",
        )
    return size / _TOKEN_BYTES[path.suffix]
