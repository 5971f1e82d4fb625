"""`drystone doctor`: what is installed, what is missing for what, and which devices are here."""

from __future__ import annotations

from typing import TYPE_CHECKING, Annotated, Any

import typer

if TYPE_CHECKING:
    from drystone.run.installed import Finding


def doctor(
    as_json: Annotated[bool, typer.Option("--json", help="Print JSON instead of a table.")] = False,
) -> None:
    """Say what is installed, missing, and which devices are here.

    Ends with 0 if the core is whole; what else is missing is told with the command that adds it.

    With --json: {"version", "python", "features": [{name, works, commands, fix, parts: [{name,
    wanted, found, is_right}]}], "devices": {"gpus": [names], "cores", "memory_bytes", "emulates"},
    "controller": {"folder", "answers"}}.
    """
    from drystone.run.installed import examine

    findings = examine()
    told = {
        **_about(),
        "features": [_as_dict(one) for one in findings],
        "devices": _devices(),
        "controller": _controller(),
    }
    if as_json:
        from drystone.cli.output import print_json

        print_json(told)
    else:
        _print(told)
    if not findings[0].works:
        raise typer.Exit(1)


def _about() -> dict[str, str]:
    import platform

    from drystone import __version__

    return {"version": __version__, "python": platform.python_version()}


def _as_dict(finding: Finding) -> dict[str, Any]:
    from dataclasses import asdict

    return {
        "name": finding.feature.name,
        "works": finding.works,
        "commands": finding.feature.commands,
        "fix": finding.fix,
        "parts": [asdict(part) for part in finding.parts],
    }


def _devices() -> dict[str, Any]:
    import os

    from drystone.run.engines.local.devices import local_gpus

    names = local_gpus()
    return {
        "gpus": names,
        "cores": os.cpu_count() or 0,
        "memory_bytes": os.sysconf("SC_PAGE_SIZE") * os.sysconf("SC_PHYS_PAGES"),
        "emulates": not names,
    }


def _controller() -> dict[str, Any]:
    from drystone.errors import DrystoneError
    from drystone.service.client import Client, default_folder

    folder = default_folder()
    try:
        Client(folder).get("/v1/health")
    except (DrystoneError, OSError):
        return {"folder": str(folder), "answers": False}
    return {"folder": str(folder), "answers": True}


def _print(told: dict[str, Any]) -> None:
    from drystone.cli.output import Column, make_console, print_table
    from drystone.units import GiB

    columns = (
        Column(header="feature", justify="left", style="bold"),
        Column(header="state", justify="left"),
        Column(header="for", justify="left", rank=2),
        Column(header="stands on", justify="left", rank=3, style="cyan"),
        Column(header="to add it", justify="left", rank=1, style="yellow"),
    )
    rows = [
        (
            one["name"],
            "works" if one["works"] else "missing",
            one["commands"],
            ", ".join(_part(part) for part in one["parts"]),
            one["fix"] or "-",
        )
        for one in told["features"]
    ]
    print_table(f"Drystone {told['version']}, Python {told['python']}", columns, rows)
    devices, console = told["devices"], make_console()
    gpus = ", ".join(devices["gpus"]) or "none: devices are emulated on this processor"
    console.print()
    console.print(f"GPUs        {gpus}")
    memory = devices["memory_bytes"] / GiB
    console.print(f"Processor   {devices['cores']} cores, {memory:.1f} GiB")
    answers = (
        "answers" if told["controller"]["answers"] else "none runs; `drystone serve` starts it"
    )
    console.print(f"Controller  {answers}", soft_wrap=True)


def _part(part: dict[str, Any]) -> str:
    if not part["found"]:
        return f"no {part['name']}"
    shown = part["name"] if part["wanted"] == "on PATH" else f"{part['name']} {part['found']}"
    return shown if part["is_right"] else f"{shown} (wanted {part['wanted']})"
