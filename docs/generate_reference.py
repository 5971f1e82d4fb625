"""Writes docs/reference/*.md from the code: commands, files, REST, metrics, JSON shapes.

`make reference` runs it; `--check` writes nothing and fails where a page is not up to date.
"""

from __future__ import annotations

import argparse
import inspect
import re
import sys
import typing
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import replace
from pathlib import Path
from typing import Any, Final

from reference_fields import NOTE, FieldText, code, fields_of, plain_type, table
from reference_service import metrics_page, rest_page

ROOT: Final = Path(__file__).resolve().parents[1]
FOLDER: Final = ROOT / "docs" / "reference"
# What is printed as the service answers it.
ANSWERS: Final = {
    "submit": "SubmittedJob", "jobs": "JobPage", "show": "JobDetails", "why": "Why",
    "cluster": "Cluster", "budget": "LedgerPage", "team list": "TeamList",
    "token list": "TokenList", "token create": "TokenNew",
}  # fmt: skip


def main() -> int:
    """Write the pages, or say which are not up to date."""
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--check", action="store_true", help="write nothing")
    wants_check = parser.parse_args().check
    stale = []
    for name, make in PAGES.items():
        text = "\n".join(make()).rstrip() + "\n"
        path = FOLDER / name
        if path.is_file() and path.read_text(encoding="utf-8") == text:
            continue
        stale.append(name)
        if not wants_check:
            path.write_text(text, encoding="utf-8")
    if stale and wants_check:
        sys.stderr.write(f"not up to date: {', '.join(stale)}. Run `make reference`.\n")
        return 1
    return 0


# Commands


def commands_page() -> Iterator[str]:
    """Every verb with its arguments and options."""
    from drystone.cli.main import VERBS

    yield from ("# Commands", "", NOTE, "")
    yield "`drystone --help` lists the verbs, `drystone VERB --help` says what is below."
    yield "Exit codes: 0 done, 1 the work failed, 2 the request was wrong, 3 nothing fits."
    yield "Examples are those of the help texts: tests parse them, and do not run them."
    yield ""
    yield from table(
        ["verb", ""], [[f"[`{verb}`](#drystone-{verb})", told] for verb, told in VERBS.items()]
    )
    for verb in VERBS:
        command = _command(verb)
        yield from _command_lines(f"drystone {verb}", command, level=2)


def _command(verb: str) -> Any:
    import typer.main

    from drystone.cli.main import _build_app

    app: Any = typer.main.get_command(_build_app([verb]))
    return app.commands[verb]


def _command_lines(name: str, command: Any, *, level: int) -> Iterator[str]:
    yield from ("#" * level + f" {name}", "")
    yield from _help_lines(command.help or "")
    yield from _help_lines(command.epilog or "")
    for sub, inner in getattr(command, "commands", {}).items():
        yield from _command_lines(f"{name} {sub}", inner, level=level + 1)
    if not hasattr(command, "commands"):
        rows = list(_parameter_rows(command))
        if rows:
            yield from table(["argument or option", "type", "default", ""], rows)


def _help_lines(text: str) -> Iterator[str]:
    """Paragraphs of a help text; those that show commands become blocks of them."""
    for paragraph in re.split(r"\n\s*\n", inspect.cleandoc(text)):
        lines = [line.rstrip() for line in paragraph.replace("\b", "").splitlines() if line.strip()]
        if not lines:
            continue
        shown = [line.strip().removeprefix("$ ") for line in lines]
        heading = [line for line in shown if line.lower().rstrip(":") in ("example", "examples")]
        rest = [line for line in shown if line not in heading]
        if rest and rest[0].startswith(("drystone ", "# ")):
            follows = [False, *(line.endswith("\\") for line in rest)]
            rest = [
                f"  {line}" if after else line
                for line, after in zip(rest, follows[:-1], strict=True)
            ]
            yield from ("```sh", *rest)
            yield from ("```", "")
        elif rest:
            yield from (_escaped(" ".join(rest)), "")


def _escaped(text: str) -> str:
    """Options and shapes as code, so that Markdown leaves them alone."""
    parts = text.split("`")  # what stands at odd places is code already
    for index in range(0, len(parts), 2):
        shapes = _split_shapes(parts[index])
        for place, shape in enumerate(shapes):
            if place % 2:
                shapes[place] = f"`{shape}`"
            else:
                shape = re.sub(r"(?<![\w-])(--[a-z][a-z-]*)", r"`\1`", shape)
                shapes[place] = re.sub(r"docs/(\w+\.md)", r"[\1](../\1)", shape)
        parts[index] = "".join(shapes)
    return "`".join(parts)


def _split_shapes(text: str) -> list[str]:
    """Text cut into sentences and what stands in braces, by turns."""
    pieces, depth = [""], 0
    for letter in text:
        if letter == "{" and depth == 0:
            pieces.append("")
        depth += (letter == "{") - (letter == "}")
        pieces[-1] += letter
        if letter == "}" and depth == 0:
            pieces.append("")
    return pieces


def _parameter_rows(command: Any) -> Iterator[list[str]]:
    hints = typing.get_type_hints(inspect.unwrap(command.callback), include_extras=True)
    for parameter in command.params:
        if getattr(parameter, "hidden", False) or parameter.name not in hints:
            continue
        is_argument = parameter.param_type_name == "argument"
        names = [parameter.name.upper()] if is_argument else parameter.opts
        names = [*names, *parameter.secondary_opts]
        kind, limits = _kind(hints[parameter.name])
        default = "needed" if parameter.required else _shown_default(parameter.default)
        told = (parameter.help or "").strip()
        if parameter.envvar:
            told += f" Else `{parameter.envvar}`."
        yield [", ".join(map(code, names)), ", ".join([kind, *limits]), default, _escaped(told)]


def _kind(hint: Any) -> tuple[str, list[str]]:
    limits: list[str] = []
    if typing.get_origin(hint) is typing.Annotated:
        hint, *marks = typing.get_args(hint)
        for mark in marks:
            least, most = getattr(mark, "min", None), getattr(mark, "max", None)
            limits += [f">= {least}"] if least is not None else []
            limits += [f"<= {most}"] if most is not None else []
    arguments = [one for one in typing.get_args(hint) if one is not type(None)]
    if typing.get_origin(hint) is list:
        return f"{_kind(arguments[0])[0]}, several", limits
    if arguments and typing.get_origin(hint) is not typing.Literal:
        return _kind(arguments[0])[0], limits
    words = {"str": "text", "bool": "flag", "int": "whole number", "float": "number"}
    name = getattr(hint, "__name__", str(hint))
    return words.get(name, name.lower()), limits


def _shown_default(value: Any) -> str:
    if value is None or value is False or value in ("", [], ()):
        return ""
    return code(str(value))


# Files


def job_file_page() -> Iterator[str]:
    """The keys of a job file."""
    from drystone.describe.files import job_parts as parts

    yield from ("# The job file", "", NOTE, "")
    yield "Read by `describe/files/job.py`; [how to use it](../jobs.md). A key that is not here is"
    yield "an error with a hint. Counts may be written `500`, `1e9`, `500M`, `2B`; durations"
    yield "`90s`, `6h`, `1d 12h`."
    yield ""
    for prefix, part, section in (
        ("", parts.JobPart, "-"),
        ("data.", parts.DataPart, "data"),
        ("train.", parts.TrainPart, "train"),
        ("train.optimizer.", parts.OptimizerPart, "optimizer"),
        ("tune.", parts.TunePart, "-"),
        ("evaluate.", parts.EvaluatePart, "evaluate"),
        ("gpus.", parts.GpuPart, "-"),
    ):
        title = f"`{prefix.rstrip('.')}`" if prefix else "Keys"
        yield from (f"## {title}", "", inspect.getdoc(part) or "", "")
        yield from _key_table(part, prefix=prefix, more=_options_of(section))


def _options_of(section: str) -> list[FieldText]:
    """The options of one section of a job file, under their keys."""
    from drystone.describe.files.job_parts import options_of
    from drystone.describe.job import TrainConfig

    keys = {name: key for key, name in options_of(section).items()}
    known = [text for text in fields_of(TrainConfig) if text.name in keys]
    return [replace(text, name=keys[text.name]) for text in known]


def market_file_page() -> Iterator[str]:
    """The keys of a market file."""
    from drystone.describe.files import market as market_file
    from drystone.describe.files.cluster import EmulatePart
    from drystone.describe.market import Offer

    told = {one.name: one.comment for one in fields_of(Offer)}
    told |= {"spot": told["is_spot"], "emulate": told["emulation"]}
    yield from ("# The market file", "", NOTE, "")
    yield "Read by `describe/files/market.py`; [how renting works](../renting.md)."
    yield "A list `offers`, each:"
    yield ""
    yield from _key_table(market_file._OfferPart, told=told)
    yield "Beside it `gpu_types`, as in a [cluster file](cluster-file.md#gpu_types-each)."
    yield ""
    yield from ("## `price_changes`, each", "")
    yield from _key_table(market_file._ChangePart)
    yield from ("## `spot_trace`", "")
    yield from _key_table(market_file._SpotTracePart)
    yield from ("## `emulate`", "")
    yield from _key_table(EmulatePart)


def cluster_file_page() -> Iterator[str]:
    """The keys of a cluster file."""
    from drystone.describe.files import cluster as cluster_file
    from drystone.describe.files import gpu_types as own_gpus

    yield from ("# The cluster file", "", NOTE, "")
    yield "Read by `describe/files/cluster.py`, for `serve`, `plan` and `simulate` alike. A key"
    yield "that is not here is an error with a hint. `simulate` refuses emulation, needs no prices."
    yield ""
    for title, part in (
        ("Keys", cluster_file.ClusterPart),
        ("`nodes`, each", cluster_file.NodePart),
        ("`emulate`", cluster_file.EmulatePart),
    ):
        yield from (f"## {title}", "")
        yield from _key_table(part)
    yield from ("## `gpu_types`, each", "", "By its name; in a market file too.", "")
    yield from _key_table(own_gpus.GpuTypePart)


def _key_table(
    part: type[Any],
    *,
    prefix: str = "",
    told: Mapping[str, str] | None = None,
    more: Sequence[FieldText] = (),
) -> list[str]:
    told = told or {}
    rows = []
    for one in [*fields_of(part), *more]:
        is_needed = not one.default and part.model_fields[one.name].is_required()
        meaning = one.comment or told.get(one.name, "")
        default = "needed" if is_needed else code(one.default)
        key = part.model_fields[one.name].alias or one.name
        rows.append([code(prefix + key), plain_type(one.type), default, meaning])
    return table(["key", "type", "default", "meaning"], rows)


# JSON


def json_page() -> Iterator[str]:
    """What `--json` prints, verb by verb, and the types behind it."""
    from drystone.cli.main import VERBS
    from drystone.describe.gpu import GpuSpec
    from drystone.estimate.learned.profile import Profile
    from drystone.estimate.whole import Estimate, StageEstimate
    from drystone.observe.frontier import FrontierPoint
    from drystone.observe.metrics import RunReport
    from drystone.observe.trace_summary import TraceSummary
    from drystone.plan.plan import GpuNeed, Plan, RankShare, StagePlan

    yield from ("# JSON of the commands", "", NOTE, "")
    yield "Every command that prints for people takes `--json` and then prints one document. What"
    yield "talks to a service prints the service's answer, in the shapes of [REST](rest.md#shapes)."
    yield ""
    rows = []
    for verb in VERBS:
        command = _command(verb)
        inner = getattr(command, "commands", {"": command})
        for sub, one in inner.items():
            if any("--json" in parameter.opts for parameter in one.params):
                name = f"drystone {verb} {sub}".strip()
                answer = ANSWERS.get(name.removeprefix("drystone "), "")
                link = f"[{answer}](rest.md#{answer.lower()})" if answer else ""
                named = f"[`{name}`](commands.md#{name.replace(' ', '-')})"
                rows.append([named, _json_shape(one), link])
    yield from table(["command", "what its help says of the shape", "the service's"], rows)
    yield from (
        "## Types",
        "",
        "Units stand in the names. `inf` and `nan` are written as null.",
        "",
    )
    for cls in (
        Plan, StagePlan, RankShare, GpuNeed, Estimate, StageEstimate, RunReport, FrontierPoint,
        TraceSummary, Profile, GpuSpec,
    ):  # fmt: skip
        where = f"`{cls.__module__.removeprefix('drystone.').replace('.', '/')}.py`"
        told = (inspect.getdoc(cls) or "").partition("\n\n")[0].replace("\n", " ")
        yield from (f"### {cls.__name__}", "", f"{told} In {where}.", "")
        yield from table(
            ["field", "type", "meaning"],
            [[code(one.name), code(one.type), one.comment] for one in fields_of(cls)],
        )


def _json_shape(command: Any) -> str:
    paragraphs = re.split(r"\n\s*\n", inspect.cleandoc(command.help or ""))
    found = [one for one in paragraphs if one.startswith("With --json")]
    text = " ".join(" ".join(found).split()).removeprefix("With --json").lstrip(": ")
    return _escaped(text.removesuffix("."))


PAGES: Final[Mapping[str, Callable[[], Any]]] = {
    "commands.md": commands_page,
    "job-file.md": job_file_page,
    "cluster-file.md": cluster_file_page,
    "market-file.md": market_file_page,
    "rest.md": rest_page,
    "metrics.md": metrics_page,
    "json.md": json_page,
}

if __name__ == "__main__":
    sys.exit(main())
