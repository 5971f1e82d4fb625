"""`drystone verify`: tries on this machine's devices everything that training needs; one report."""

from __future__ import annotations

import importlib.util
import json
import tempfile
import time
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Any, Final

import typer

from drystone.errors import DrystoneError, MissingExtra, RequestError

if TYPE_CHECKING:
    from drystone.run.verify.checks import Check, Trial

_MAX_DEVICES: Final = 8
_MARKS: Final = {"passed": ("ok", "green"), "failed": ("FAILED", "bold red"),
                 "left out": ("-", "dim")}  # fmt: skip


def verify(
    devices: Annotated[
        str,
        typer.Option(
            help="Emulate these on the processor, such as 4xA100-80G or 2xA100-80G,2xT4. Left out: "
            "the GPUs of this machine, or 2xA100-80G where there are none."
        ),
    ] = "",
    quick: Annotated[bool, typer.Option(help="One model instead of two.")] = False,
    report: Annotated[
        Path | None,
        typer.Option(help="Also write the report here, as JSON and, beside it, as text."),
    ] = None,
    as_json: Annotated[bool, typer.Option("--json", help="Print JSON instead of lines.")] = False,
) -> None:
    """Try on these devices everything that training needs.

    Collectives with pieces of unequal size; a small model by every kind of plan that the planner
    has for these devices, its losses compared with one device; memory and speed against the
    estimates, on GPUs; a rank that is killed; fewer ranks. On a processor it takes a few minutes.
    Exit code 1 where anything failed.

    With --json: {pool, is_emulated, software, seconds, num_failed, checks: [{name, outcome, detail,
    hint, seconds}]}.
    """
    if importlib.util.find_spec("torch") is None:
        raise MissingExtra("verifying needs torch", "runtime")
    if report is not None and not report.absolute().parent.is_dir():
        raise RequestError(f"there is no folder {str(report.parent)!r} to write into")

    from drystone.run.verify.checks import describe_software, verify

    began = time.monotonic()
    with tempfile.TemporaryDirectory(prefix="drystone-verify-") as folder:
        trial = _make_trial(devices, Path(folder), is_quick=quick)
        _say_what(trial)
        checks = []
        for check in verify(trial):
            checks.append(check)
            _show(check)
    failed = [check for check in checks if check.outcome.value == "failed"]
    document = {
        "pool": str(trial.pool),
        "is_emulated": trial.devices.is_emulated,
        "software": describe_software(),
        "seconds": round(time.monotonic() - began, 1),
        "num_failed": len(failed),
        "checks": [check.to_json() for check in checks],
    }
    _finish(document, report, as_json=as_json)
    if failed:
        raise DrystoneError(f"{len(failed)} of {len(checks)} checks failed")


def _make_trial(text: str, folder: Path, *, is_quick: bool) -> Trial:
    from drystone.describe.catalogue import find_gpu
    from drystone.describe.pool import parse_pool
    from drystone.run.engines.local import local_gpus
    from drystone.run.verify.checks import Trial
    from drystone.run.verify.ranks import Devices

    numbers: dict[str, list[int]] = {}
    if not text:
        for index, name in enumerate(local_gpus()[:_MAX_DEVICES]):
            numbers.setdefault(find_gpu(name).name, []).append(index)
        text = ",".join(f"{len(some)}x{gpu}" for gpu, some in numbers.items())
    pool = parse_pool(text or "2xA100-80G")
    if pool.num_gpus > _MAX_DEVICES:
        raise RequestError(
            f"{pool.num_gpus} devices: at most {_MAX_DEVICES} are tried at once",
            hint=f"Try --devices {_MAX_DEVICES}x{pool.groups[0].gpu.name}",
        )
    devices = Devices(numbers=numbers, is_emulated=not numbers)
    return Trial(pool=pool, devices=devices, folder=folder, is_quick=is_quick)


def _say_what(trial: Trial) -> None:
    from drystone.cli.output import make_console

    where = "emulated on the processor" if trial.devices.is_emulated else "of this machine"
    make_console(stderr=True).print(f"{trial.pool} {where}; this takes a few minutes.")


def _show(check: Check) -> None:
    """Each check as soon as it is known."""
    from rich.text import Text

    from drystone.cli.output import make_console

    word, style = _MARKS[check.outcome.value]
    console = make_console(stderr=True)
    console.print(Text.assemble((f"{word:<7}", style), f"{check.name}  ", (check.detail, "dim")))
    if check.hint:
        console.print(f"       Try: {check.hint}")


def _finish(document: dict[str, Any], report: Path | None, *, as_json: bool) -> None:
    from drystone.cli.output import make_console, print_json

    if report is not None:
        readable = report.with_suffix(".txt" if report.suffix != ".txt" else ".json")
        table, text = (report, readable) if report.suffix != ".txt" else (readable, report)
        table.write_text(json.dumps(document, indent=2) + "\n", encoding="utf-8")
        text.write_text(_as_text(document), encoding="utf-8")
        make_console(stderr=True).print(f"Written: {table} and {text}")
    if as_json:
        print_json(document)
        return
    make_console().print(_summary(document))


def _summary(document: dict[str, Any]) -> str:
    checks = document["checks"]
    passed = sum(check["outcome"] == "passed" for check in checks)
    text = f"{passed} of {len(checks)} checks passed in {document['seconds']:.0f} s"
    if document["is_emulated"]:
        text += "; NCCL, memory and speed of real GPUs were not tried"
    return text + "."


def _as_text(document: dict[str, Any]) -> str:
    """The report for people, as it is to be attached to an issue."""
    software = document["software"]
    versions = [f"{name} {told}" for name, told in software.items() if isinstance(told, str)]
    devices = [str(device.get("name", device)) for device in software.get("devices", ())]
    lines = [f"drystone verify on {document['pool']}", ", ".join([*versions, *devices]), ""]
    for check in document["checks"]:
        mark = _MARKS[check["outcome"]][0]
        lines.append(f"{mark:<7}{check['name']} ({check['seconds']:.1f} s): {check['detail']}")
        lines += [f"       Try: {check['hint']}"] if check["hint"] else []
    return "\n".join([*lines, "", _summary(document), ""])
