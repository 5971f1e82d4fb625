"""What a person submits: a short YAML file that names a model and how much to train it.

model: llama-3-8b            # a known name, a config.json, or module.py:function
data: corpus.bin             # or left out: made-up tokens
train: {tokens: 2B, batch: 256, sequence: 4096}

Everything else is optional; `docs/jobs.md` lists it. Nothing about hardware is needed.
"""

from __future__ import annotations

import re
import shlex
from dataclasses import replace
from pathlib import Path
from typing import Any, Final

from drystone.describe.files.amounts import parse_duration, parse_instant
from drystone.describe.files.job_parts import (
    ALL_LINEAR,
    LEAVES_GPUS,
    EvaluatePart,
    JobPart,
    TrainPart,
    TunePart,
    options_of,
)
from drystone.describe.files.launchers import Launch, unwrap
from drystone.describe.files.reader import (
    Document,
    Key,
    Part,
    load_yaml,
    parse_yaml,
    read_part,
)
from drystone.describe.job import TrainConfig, TrainingJob
from drystone.describe.model_source import is_config_folder
from drystone.describe.patience import JobPatience
from drystone.describe.recipe import Lora
from drystone.errors import InvalidSpec, RequestError, UnreadableFile

_PATH_ENDINGS: Final = (
    ".bin",
    ".u16",
    ".u32",
    ".txt",
    ".jsonl",
    ".ndjson",
    ".parquet",
    ".arrow",
)
_OPTIMIZERS: Final = {"adamw": "adam", "adamw-8bit": "adam-8bit"}  # names that mean another one
# Options of an optimizer that not every one has, and who has them; muon for its part by AdamW.
_ADAMS: Final = ("adam", "adam-8bit", "muon")
_OPTIONS_OF_SOME: Final = {
    "beta1": (*_ADAMS, "lion"),
    "beta2": (*_ADAMS, "lion"),
    "epsilon": _ADAMS,
}


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
    part = read_part(document, JobPart, context=None if knows_gpus else LEAVES_GPUS)
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
    if part.train.epochs is not None and part.data.train == "synthetic":
        raise refuse(("train", "epochs"), "made-up data has no epochs", "Give steps or tokens")
    if part.command is not None and part.train.steps is None:
        raise refuse(("train",), "a command needs a number of steps", "Write train: {steps: 1000}")
    if part.train.compile and ".py:" in (part.model or ""):
        raise refuse(("train", "compile"), "is not for a module of your own", "Leave it out")
    _check_optimizer(part.train, document)
    _check_tuning(part, document)
    _check_evaluation(part, document)
    _check_limits(part, document)


def _check_optimizer(train: TrainPart, document: Document) -> None:
    """Options that stand once, and that the optimizer has."""
    optimizer = train.optimizer
    name = _optimizer_name(train)
    for key in options_of("optimizer"):
        in_table = getattr(optimizer, key) is not None
        in_train = getattr(train, key) is not None
        where = ("train", "optimizer", key) if in_table else ("train", key)
        if in_table and in_train:
            raise InvalidSpec(
                f"{key} stands in `train` and in its `optimizer`",
                where=document.place(("train", key)),
                hint="Keep that of the optimizer",
            )
        if (in_table or in_train) and name not in _OPTIONS_OF_SOME.get(key, (name,)):
            raise InvalidSpec(
                f"{optimizer.name} has no {key}",
                where=document.place(where),
                hint=f"Leave it out; it is of {', '.join(_OPTIONS_OF_SOME[key])}",
            )


def _optimizer_name(train: TrainPart) -> str:
    return _OPTIMIZERS.get(train.optimizer.name, train.optimizer.name)


def _check_tuning(part: JobPart, document: Document) -> None:
    """Only what is done is accepted."""

    def refuse(key: Key, message: str, hint: str = "") -> InvalidSpec:
        return InvalidSpec(message, where=document.place(key), hint=hint)

    tune = part.tune
    if tune is None:
        return
    if part.command is not None:
        raise refuse(("tune",), "a command decides for itself what it trains", "Leave out tune")
    given = [key for key in TunePart.model_fields if getattr(tune, key) is not None]
    if tune.method == "full" and len(given) > 1:
        raise refuse(("tune", given[1]), f"{given[1]} is of adapters", "Write method: lora")
    if ".py:" in (part.model or "") and tune.method != "full":
        raise refuse(
            ("tune",),
            "adapters are not put into a module of your own",
            "Add them in your function, and freeze what is not to be trained",
        )


def _keys(part: Part) -> dict[str, Any]:
    """A part as a table: mypy does not see the keys that options of `TrainConfig` add."""
    return dict(part)


def _check_evaluation(part: JobPart, document: Document) -> None:
    def refuse(key: Key, message: str, hint: str) -> InvalidSpec:
        return InvalidSpec(message, where=document.place(key), hint=hint)

    given = [key for key in EvaluatePart.model_fields if getattr(part.evaluate, key)]
    held_out: str | None = _keys(part.data)["eval"]
    if part.command is not None:
        for key, is_given in (("evaluate", given), ("report", part.report)):
            if is_given:
                raise refuse((key,), "is not for a command, which does it itself", "Leave it out")
    if given and not held_out:
        raise refuse(("evaluate",), "there is no held-out data", "Write data: {eval: FILE}")
    every = _keys(part.evaluate)["every"]
    for key in ("keep_best", "stop_after"):
        if key in given and not every:
            raise refuse(
                ("evaluate", key), f"{key} needs evaluations on the way", "Write every: 100"
            )
    if held_out and part.data.train == "synthetic":
        raise refuse(("data", "eval"), "made-up data has nothing held out", "Name data.train too")


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
            raise refuse(("environment", key), "is not a valid name for an environment variable")


def _training_job(
    part: JobPart, document: Document, *, folder: Path, owner: str, name: str
) -> TrainingJob:
    train, gpus = part.train, part.gpus
    after, at = _deadline(part.deadline, document)
    launch = _launch(part, document)
    fallback = part.model.rsplit("/", 1)[-1] if part.model else (launch.command or ("job",))[0]
    plain_name = re.sub(r"[^A-Za-z0-9._+-]+", "-", name or fallback).strip("-._+")[:80]
    return TrainingJob(
        name=part.name or plain_name or "job",
        owner=part.owner or owner,
        model=_model_path(part.model or "", folder),
        data=_data_path(part.data.train, folder, document),
        num_steps=train.steps or 0,
        num_tokens=train.tokens or 0,
        num_epochs=train.epochs or 0.0,
        global_batch=train.batch,
        seq_len=train.sequence or 0,
        precision=train.precision,
        optimizer=_optimizer_name(train),
        tuning=part.tune.method if part.tune is not None else "full",
        lora=_lora(part.tune),
        is_compiled=train.compile,
        from_scratch=part.start == "scratch",
        train=_train_config(part, folder),
        priority=part.priority,
        deadline_after_seconds=after,
        deadline_at_seconds=at,
        max_cost_dollars=part.max_cost,
        max_duration_seconds=part.max_duration,
        allowed_gpus=gpus.allow,
        denied_gpus=gpus.deny,
        min_gpus=launch.min_ranks or gpus.min,
        max_gpus=launch.max_ranks or gpus.max,
        command=launch.command,
        environment=tuple(sorted({**launch.environment, **part.environment}.items())),
        folder=str(folder),
        patience=JobPatience(
            start_seconds=part.patience.start,
            silence_seconds=part.patience.silence,
            grace_seconds=part.patience.grace,
        ),
    )


def _launch(part: JobPart, document: Document) -> Launch:
    """The command without a launcher before it; what `gpus` says goes before what that says."""
    where = document.place(("command",))
    try:
        words = tuple(shlex.split(part.command)) if part.command else ()
    except ValueError as error:
        raise InvalidSpec(f"cannot be split into words: {error}", where=where) from None
    found = unwrap(words, where=where)
    is_said = part.gpus.model_fields_set & {"min", "max"}
    return replace(found, min_ranks=None, max_ranks=None) if is_said else found


def _train_config(part: JobPart, folder: Path) -> TrainConfig:
    """What the sections say, under the names that their options have."""
    given: dict[str, Any] = {}
    for section, names in (
        (part.train, options_of("train", "optimizer")),
        (part.train.optimizer, options_of("optimizer")),
        (part.data, options_of("data")),
        (part.evaluate, options_of("evaluate")),
    ):
        found = {name: getattr(section, key) for key, name in names.items()}
        given |= {name: value for name, value in found.items() if value is not None}
    for path in ("tokenizer", "eval_data"):
        if given.get(path):
            given[path] = str(folder / given[path])
    given["report"] = ",".join(dict.fromkeys(part.report))
    return TrainConfig(**given)


def _lora(tune: TunePart | None) -> Lora:
    if tune is None:
        return Lora()
    given = {key: getattr(tune, key) for key in ("rank", "alpha", "dropout", "train_embeddings")}
    if tune.targets is not None and ALL_LINEAR not in tune.targets:
        given["targets"] = tuple(dict.fromkeys(tune.targets))
    return Lora(**{key: value for key, value in given.items() if value is not None})


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
            f"{str(value)[:60]!r} is not a deadline",
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
    path = folder / data
    if path.suffix and not data.endswith(_PATH_ENDINGS) and not path.is_dir():
        raise InvalidSpec(
            f"{data[:60]!r} is not a known kind of data",
            where=document.place(("data",)),
            hint="Give synthetic, a folder, or a file that ends in " + ", ".join(_PATH_ENDINGS),
        )
    return str(path)
