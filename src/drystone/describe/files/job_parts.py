"""Keys of a job file: what each part of it may say, as strict tables."""

from __future__ import annotations

import re
from collections.abc import Callable
from dataclasses import fields
from typing import Annotated, Any, Final, Literal, TypeVar, cast, get_type_hints

from pydantic import AfterValidator, BeforeValidator, Field, ValidationInfo, create_model

from drystone.describe.catalogue import find_gpu
from drystone.describe.files.amounts import parse_count, parse_duration, parse_span
from drystone.describe.files.reader import Part, Refused, checked
from drystone.describe.job import TrainConfig
from drystone.describe.recipe import Lora
from drystone.errors import InvalidSpec, RequestError, UnknownName

LEAVES_GPUS: Final = "leaves GPU types to the service"
_NAME: Final = re.compile(r"[A-Za-z0-9][A-Za-z0-9._ +-]{0,79}")


def _check_name(text: str) -> str:
    if not _NAME.fullmatch(text):
        raise Refused(
            InvalidSpec(
                f"{text[:60]!r} is not a valid name",
                hint="Use up to 80 letters, digits, spaces and . _ + -, beginning with a letter",
            )
        )
    return text


def _check_gpu(text: str, info: ValidationInfo) -> str:
    try:
        return find_gpu(text).name
    except RequestError as error:
        if info.context == LEAVES_GPUS:
            return text
        raise Refused(error) from None


def _check_text(text: str) -> str:
    if not text.strip() or not text.isprintable():
        raise Refused(InvalidSpec(f"{text[:60]!r} must be one line of text"))
    return text.strip()


def _check_target(text: str) -> str:
    """`q_proj`, as `transformers` has it, and `q`, as the recipe has it, are the same."""
    short = text.removesuffix("_proj")
    if text in _STORED_TOGETHER:
        hint = f"Write {', '.join(_STORED_TOGETHER[text])}: each gets one"
        raise Refused(InvalidSpec(f"adapters do not stand beside {text}", hint=hint))
    if short not in (*Lora.KNOWN_TARGETS, ALL_LINEAR):
        known = [ALL_LINEAR, *(f"{target}_proj" for target in Lora.KNOWN_TARGETS)]
        raise Refused(UnknownName("target of adapters", text, known))
    return short


# Targets as single families name them, and the matrices that they are.
_STORED_TOGETHER: Final = {
    "qkv_proj": ("q_proj", "k_proj", "v_proj"),
    "gate_up_proj": ("gate_proj", "up_proj"),
    "c_attn": ("q_proj", "k_proj", "v_proj"),
    "c_fc": ("up_proj",),
    "c_proj": ("o_proj", "down_proj"),
}


def _named(key: str) -> BeforeValidator:
    """A word alone stands for the table that has only this key."""
    return BeforeValidator(lambda value: {key: value} if isinstance(value, str) else value)


ALL_LINEAR: Final = "all-linear"
# A word alone stands for the list of it.
_LISTED: Final = BeforeValidator(lambda value: [value] if isinstance(value, str) else value)
Count = Annotated[int, checked(parse_count)]
Duration = Annotated[float, checked(parse_duration)]
Span = Annotated[str, checked(parse_span)]
Name = Annotated[str, AfterValidator(_check_name)]
Line = Annotated[str, Field(max_length=4096), AfterValidator(_check_text)]
Gpu = Annotated[str, AfterValidator(_check_gpu)]
Target = Annotated[str, AfterValidator(_check_target)]
PositiveFloat = Annotated[float, Field(gt=0, le=1e12)]

PartClass = TypeVar("PartClass", bound=type[Part])
_HINTS: Final = get_type_hints(TrainConfig)


def options_of(*sections: str) -> dict[str, str]:
    """The fields of `TrainConfig` that stand in these sections of a file, by their keys."""
    return {
        option.metadata["key"] or option.name: option.name
        for option in fields(TrainConfig)
        if option.metadata["section"] in sections
    }


def _with_options(*sections: str) -> Callable[[PartClass], PartClass]:
    """A class with the options of these sections as keys; those left out are None."""
    by_name = {option.name: option for option in fields(TrainConfig)}
    keys: dict[str, Any] = {}
    for key, name in options_of(*sections).items():
        option = by_name[name]
        kind = _HINTS[name]
        if option.metadata["is_count"]:
            kind = Count
        elif option.metadata["is_span"]:
            kind = Span
        keys[key] = (kind | None, Field(None, **option.metadata["limits"]))

    def add(cls: PartClass) -> PartClass:
        made = create_model(
            cls.__name__, __base__=cls, __doc__=cls.__doc__, __module__=cls.__module__, **keys
        )
        return cast("PartClass", made)

    return add


@_with_options("optimizer")
class OptimizerPart(Part):
    """The optimizer and its learning rate; its name alone will do."""

    # adam and adamw are the same, in 8 bit too; muon for the matrices of blocks, adamw for the rest
    name: Literal[
        "adam",
        "adamw",
        "adam-8bit",
        "adamw-8bit",
        "sgd",
        "sgd-momentum",
        "lion",
        "adafactor",
        "muon",
    ] = "adamw"


@_with_options("train", "optimizer")
class TrainPart(Part):
    """How much to train, and how. Keys of `optimizer` may also stand here."""

    steps: Count | None = None  # how much: exactly one of steps, tokens and epochs
    tokens: Count | None = None  # rounded up to whole steps
    epochs: PositiveFloat | None = None  # times through the data
    batch: Annotated[Count, Field(le=10**9)] = 256  # sequences in a step
    sequence: Annotated[Count, Field(le=10**9)] | None = None  # tokens; the model's, at most 4096
    # auto: bf16-mixed where every GPU it may use knows it, else fp16-mixed; emulated: fp32
    precision: Literal["auto", "fp32", "tf32", "bf16-mixed", "fp16-mixed"] = "auto"
    # torch.compile of every block; only where each GPU holds all weights
    compile: bool = False
    # its name, or the table below
    optimizer: Annotated[OptimizerPart, _named("name")] = Field(default_factory=OptimizerPart)


@_with_options("data")
class DataPart(Part):
    """What to train on; its path alone will do."""

    # synthetic, or a file: tokens (.bin, .u16, .u32), text (.txt), records (.jsonl, .parquet,
    # .arrow), or a folder of such files or of `datasets`
    train: Line = "synthetic"


@_with_options("evaluate")
class EvaluatePart(Part):
    """When to look at the held-out data, and what follows."""


class TunePart(Part):
    """What is trained: all weights, or adapters beside frozen ones."""

    method: Literal["full", "lora", "qlora"]  # qlora: the frozen weights are kept in 4 bits
    rank: Annotated[int, Field(ge=1, le=65_536)] | None = None  # of adapters; left out: 16
    # their product counts alpha / rank times; left out: once
    alpha: PositiveFloat | None = None
    # matrices that get adapters, such as q_proj; left out: all-linear, which is all of the blocks
    targets: Annotated[tuple[Target, ...] | None, _LISTED] = Field(
        default=None, strict=False, min_length=1
    )
    dropout: Annotated[float, Field(ge=0, lt=1)] | None = None  # before the adapters; left out: 0
    # embeddings and head are trained too, whole; left out: false
    train_embeddings: bool | None = None


class GpuPart(Part):
    """Which GPUs may be used; all where it is left out."""

    # only these types; left out: all
    allow: Annotated[tuple[Gpu, ...], _LISTED] = Field(default=(), strict=False)
    deny: Annotated[tuple[Gpu, ...], _LISTED] = Field(default=(), strict=False)  # not these types
    min: Annotated[Count, Field(le=10**6)] = 1  # GPUs in all, at least
    max: Annotated[Count, Field(le=10**6)] = 1_000_000  # and at most


class PatiencePart(Part):
    """How long to wait for the job's processes; left out: as the service waits for all jobs."""

    # until the first report, such as 10m; left out: 2m, and for ever where a command trains
    start: Annotated[Duration, Field(ge=5, le=86_400)] | None = None
    silence: Annotated[Duration, Field(ge=5, le=86_400)] | None = None  # between two reports
    # from being asked to leave until it is killed, to save a checkpoint
    grace: Annotated[Duration, Field(ge=1, le=3_600)] | None = None


class JobPart(Part):
    """The whole file."""

    model: Line | None = None  # a known name, a config.json, module.py:function; or a command below
    # scratch: begin anew, whatever weights are beside the config; the key is `from`
    start: Literal["scratch"] | None = Field(default=None, alias="from")
    # made-up tokens where it is left out
    data: Annotated[DataPart, _named("train")] = Field(default_factory=DataPart)
    train: TrainPart = Field(default_factory=TrainPart)  # how much, and how
    tune: Annotated[TunePart, _named("method")] | None = None  # what is trained; left out: full
    # when to look at the held-out data
    evaluate: EvaluatePart = Field(default_factory=EvaluatePart)
    # where curves go besides: files beside the checkpoints
    report: Annotated[tuple[Literal["tensorboard", "wandb", "mlflow"], ...], _LISTED] = Field(
        default=(), strict=False
    )
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
    patience: PatiencePart = Field(default_factory=PatiencePart)  # how long to wait for it
