"""What a person submits: a short YAML file that names a model and how much to train it.

model: llama-3-8b            # a known name, a config.json, or module.py:function
data: corpus.bin             # or left out: made-up tokens
train: {tokens: 2B, batch: 256, sequence: 4096}

Everything else is optional; `docs/jobs.md` lists it. Nothing about hardware is needed.
"""

from __future__ import annotations

import re
import shlex
from dataclasses import fields
from pathlib import Path
from typing import Annotated, Any, Final, Literal, TypeVar, cast, get_type_hints

from pydantic import AfterValidator, Field, ValidationInfo, create_model

from drystone.describe.catalogue import find_gpu
from drystone.describe.files.amounts import parse_count, parse_duration, parse_instant
from drystone.describe.files.reader import (
    Document,
    Key,
    Part,
    Refused,
    checked,
    load_yaml,
    parse_yaml,
    read_part,
)
from drystone.describe.job import TrainConfig, TrainingJob
from drystone.describe.model_source import is_config_folder
from drystone.errors import InvalidSpec, RequestError, UnreadableFile

_LEAVES_GPUS: Final = "leaves GPU types to the service"
_NAME: Final = re.compile(r"[A-Za-z0-9][A-Za-z0-9._ +-]{0,79}")
_PATH_ENDINGS: Final = (".bin", ".u16", ".u32", ".txt")


def _check_name(text: str) -> str:
    if not _NAME.fullmatch(text):
        raise Refused(
            InvalidSpec(
                f"{text[:60]!r} is no name",
                hint="Use up to 80 letters, digits, spaces and . _ + -, beginning with a letter",
            )
        )
    return text


def _check_gpu(text: str, info: ValidationInfo) -> str:
    try:
        return find_gpu(text).name
    except RequestError as error:
        if info.context == _LEAVES_GPUS:
            return text
        raise Refused(error) from None


def _check_text(text: str) -> str:
    if not text.strip() or not text.isprintable():
        raise Refused(InvalidSpec(f"{text[:60]!r} must be one line of text"))
    return text.strip()


Count = Annotated[int, checked(parse_count)]
Duration = Annotated[float, checked(parse_duration)]
Name = Annotated[str, AfterValidator(_check_name)]
Line = Annotated[str, Field(max_length=4096), AfterValidator(_check_text)]
Gpu = Annotated[str, AfterValidator(_check_gpu)]
PositiveFloat = Annotated[float, Field(gt=0, le=1e12)]


PartClass = TypeVar("PartClass", bound=type[Part])


def _with_options(cls: PartClass) -> PartClass:
    """The class with every field of `TrainConfig` as a key of the file."""
    keys: dict[str, Any] = {}
    for option in fields(TrainConfig):
        kind = Count | None if option.metadata["is_count"] else _HINTS[option.name]
        default = None if option.metadata["is_count"] else option.default
        keys[option.name] = (kind, Field(default, **option.metadata["limits"]))
    made = create_model(
        cls.__name__, __base__=cls, __doc__=cls.__doc__, __module__=cls.__module__, **keys
    )
    return cast("PartClass", made)


_HINTS: Final = get_type_hints(TrainConfig)


@_with_options
class TrainPart(Part):
    """How much to train, and how."""

    steps: Count | None = None  # how much: exactly one of steps, tokens and epochs
    tokens: Count | None = None  # rounded up to whole steps
    epochs: PositiveFloat | None = None  # times through the data
    batch: Annotated[Count, Field(le=10**9)] = 256  # sequences in a step
    sequence: Annotated[Count, Field(le=10**9)] | None = None  # tokens; the model's, at most 4096
    # auto: bf16-mixed where every GPU it may use knows it, else fp16-mixed; emulated: fp32
    precision: Literal["auto", "fp32", "tf32", "bf16-mixed", "fp16-mixed"] = "auto"
    optimizer: Literal["adam", "sgd", "sgd-momentum"] = "adam"


class GpuPart(Part):
    """Which GPUs may be used; all where it is left out."""

    allow: tuple[Gpu, ...] = Field(default=(), strict=False)  # only these types; left out: all
    deny: tuple[Gpu, ...] = Field(default=(), strict=False)  # not these types
    min: Annotated[Count, Field(le=10**6)] = 1  # GPUs in all, at least
    max: Annotated[Count, Field(le=10**6)] = 1_000_000  # and at most


class JobPart(Part):
    """The whole file."""

    model: Line | None = None  # a known name, a config.json, module.py:function; or a command below
    data: Line = "synthetic"  # or a file of tokens (.bin, .u16, .u32) or of text (.txt)
    train: TrainPart = Field(default_factory=TrainPart)  # how much, and how
    gpus: GpuPart = Field(default_factory=GpuPart)  # which may be used
    name: Name | None = None  # left out: that of the file
    owner: Name | None = None  # left out: the user
    priority: Annotated[float, Field(gt=0, le=1e6)] = 1.0  # a weight: 2 counts for two jobs
    # 6h from submission, or a time such as 2026-11-20T18:00 (UTC where no zone is named)
    deadline: Annotated[str | int | float, Field(union_mode="left_to_right")] | None = None
    max_cost: PositiveFloat | None = None  # dollars; then it ends with a checkpoint
    max_duration: Duration | None = None  # of running, such as 2h; then it ends with a checkpoint
    command: Line | None = None  # a script of one's own instead of Drystone's runtime
    # variables for the processes
    environment: dict[str, str] = Field(default_factory=dict, max_length=200)


def load_job(path: Path, *, owner: str = "", knows_gpus: bool = True) -> TrainingJob:
    """The job that a file describes; paths in it start at the file's folder.

    With `knows_gpus=False` a GPU type that is not known here is left for the service to judge.
    """
    return _job_of(
        load_yaml(path), folder=path.resolve().parent, owner=owner, name=path.stem,
        knows_gpus=knows_gpus,
    )  # fmt: skip


def parse_job(text: str, *, folder: Path, where: str = "job", owner: str = "") -> TrainingJob:
    """The job that a text describes; paths in it start at `folder`."""
    return _job_of(parse_yaml(text, where=where), folder=folder, owner=owner, name="")


def make_job(
    table: dict[str, Any], *, folder: Path, owner: str = "", knows_gpus: bool = True
) -> TrainingJob:
    """The job that a table of the same keys describes; `knows_gpus` as above."""
    document = Document(table, {}, "job")
    return _job_of(document, folder=folder, owner=owner, name="", knows_gpus=knows_gpus)


def _job_of(
    document: Document, *, folder: Path, owner: str, name: str, knows_gpus: bool = True
) -> TrainingJob:
    if not isinstance(document.value, dict):
        raise UnreadableFile(
            "a job is a table of keys",
            where=document.where,
            hint="Write at least: model: llama-3-8b",
        )
    part = read_part(document, JobPart, context=None if knows_gpus else _LEAVES_GPUS)
    _check_whole(part, document)
    return _training_job(part, document, folder=folder, owner=owner, name=name)


def _check_whole(part: JobPart, document: Document) -> None:
    """What two values say together."""

    def refuse(key: Key, message: str, hint: str = "") -> InvalidSpec:
        return InvalidSpec(message, where=document.place(key), hint=hint)

    if part.model is None and part.command is None:
        raise refuse((), "names neither a model nor a command", "Write model: llama-3-8b")
    amounts = {
        name: getattr(part.train, name)
        for name in ("steps", "tokens", "epochs")
        if getattr(part.train, name) is not None
    }
    if len(amounts) > 1:
        raise refuse(("train",), f"{' and '.join(amounts)} contradict each other", "Keep one")
    if not amounts:
        raise refuse(("train",), "does not say how much to train", "Write train: {steps: 1000}")
    if part.train.epochs is not None and part.data == "synthetic":
        raise refuse(("train", "epochs"), "made-up data has no epochs", "Give steps or tokens")
    if part.command is not None and part.train.steps is None:
        raise refuse(("train",), "a command needs a number of steps", "Write train: {steps: 1000}")
    _check_limits(part, document)


def _check_limits(part: JobPart, document: Document) -> None:
    def refuse(key: Key, message: str) -> InvalidSpec:
        return InvalidSpec(message, where=document.place(key))

    if part.gpus.min > part.gpus.max:
        raise refuse(("gpus",), f"min {part.gpus.min} is above max {part.gpus.max}")
    both = sorted(set(part.gpus.allow) & set(part.gpus.deny))
    if both:
        raise refuse(("gpus",), f"{both[0]} is both allowed and denied")
    for key, value in part.environment.items():
        if not re.fullmatch(r"[A-Za-z_][A-Za-z0-9_]{0,127}", key) or "\0" in value:
            raise refuse(("environment", key), "is no variable of an environment")


def _training_job(
    part: JobPart, document: Document, *, folder: Path, owner: str, name: str
) -> TrainingJob:
    train, gpus = part.train, part.gpus
    after, at = _deadline(part.deadline, document)
    try:
        command = tuple(shlex.split(part.command)) if part.command else ()
    except ValueError as error:
        raise InvalidSpec(
            f"cannot be split into words: {error}", where=document.place(("command",))
        ) from None
    fallback = part.model.rsplit("/", 1)[-1] if part.model else (command or ("job",))[0]
    plain_name = re.sub(r"[^A-Za-z0-9._+-]+", "-", name or fallback).strip("-._+")[:80]
    return TrainingJob(
        name=part.name or plain_name or "job",
        owner=part.owner or owner,
        model=_model_path(part.model or "", folder),
        data=_data_path(part.data, folder, document),
        num_steps=train.steps or 0,
        num_tokens=train.tokens or 0,
        num_epochs=train.epochs or 0.0,
        global_batch=train.batch,
        seq_len=train.sequence or 0,
        precision=train.precision,
        optimizer=train.optimizer,
        train=_train_config(train),
        priority=part.priority,
        deadline_after_seconds=after,
        deadline_at_seconds=at,
        max_cost_dollars=part.max_cost,
        max_duration_seconds=part.max_duration,
        allowed_gpus=gpus.allow,
        denied_gpus=gpus.deny,
        min_gpus=gpus.min,
        max_gpus=gpus.max,
        command=command,
        environment=tuple(sorted(part.environment.items())),
        folder=str(folder),
    )


def _train_config(part: TrainPart) -> TrainConfig:
    given = {option.name: getattr(part, option.name) for option in fields(TrainConfig)}
    return TrainConfig(**{name: value for name, value in given.items() if value is not None})


def _deadline(
    value: str | int | float | None, document: Document
) -> tuple[float | None, float | None]:
    """Seconds after submission, or a time."""
    if value is None:
        return None, None
    if isinstance(value, str) and (at := parse_instant(value)) is not None:
        return None, at
    try:
        return parse_duration(value), None
    except RequestError as error:
        raise InvalidSpec(
            f"{str(value)[:60]!r} is no deadline",
            where=document.place(("deadline",)),
            hint="Write it like 6h or 2026-11-20T18:00",
        ) from error


def _model_path(model: str, folder: Path) -> str:
    """Paths made absolute, names left alone."""
    file, colon, function = model.partition(".py:")
    if colon:
        return f"{folder / file}.py:{function}"
    is_path = model.endswith(".json") or model.startswith(("./", "../", "/"))
    # A folder here is meant before a known name with an organisation, as in `models/gpt2`.
    is_path = is_path or ("/" in model and is_config_folder(folder / model))
    return str(folder / model) if is_path else model


def _data_path(data: str, folder: Path, document: Document) -> str:
    if data == "synthetic":
        return data
    if not data.endswith(_PATH_ENDINGS):
        raise InvalidSpec(
            f"{data[:60]!r} is no known kind of data",
            where=document.place(("data",)),
            hint="Give synthetic, or a file that ends in " + ", ".join(_PATH_ENDINGS),
        )
    return str(folder / data)
