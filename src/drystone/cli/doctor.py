"""`drystone doctor`: what is installed, what is missing for what, and which devices are here."""

from __future__ import annotations

import re
import shutil
from collections.abc import Callable, Mapping
from dataclasses import dataclass
from importlib.metadata import PackageNotFoundError, requires, version
from typing import Annotated, Any, Final

import typer

_REQUIREMENT = re.compile(
    r"^(?P<name>[A-Za-z0-9._-]+)(?:\[[^]]*\])?(?P<bounds>[^;]*)(?P<mark>;.*)?$"
)
_BOUND = re.compile(r"^\s*(==|>=|<=|<|>)\s*([0-9][0-9.]*)")
_COMPARE: Final[Mapping[str, Callable[[tuple[int, ...], tuple[int, ...]], bool]]] = {
    "==": lambda have, want: have[: len(want)] == want,
    ">=": lambda have, want: have >= want,
    "<=": lambda have, want: have <= want,
    "<": lambda have, want: have < want,
    ">": lambda have, want: have > want,
}


@dataclass(frozen=True, slots=True, kw_only=True)
class Feature:
    """Something that Drystone can do, and what it takes beyond the core."""

    name: str
    commands: str  # where a person meets it
    extra: str = ""  # of the package; empty: the core itself
    programs: tuple[str, ...] = ()  # on PATH


FEATURES: Final = (
    Feature(name="core", commands="plan, estimate, check, simulate, serve, submit"),
    Feature(name="plots", commands="--plot", extra="plots"),
    Feature(name="training", commands="jobs that run, profile, traced modules", extra="runtime"),
    Feature(name="solver", commands="policies sia and gavel*, exact prices", extra="solver"),
    Feature(name="mcp", commands="mcp: answers for assistants", extra="mcp"),
    Feature(name="PostgreSQL", commands="serve --database postgresql+psycopg://", extra="postgres"),
    Feature(name="Ray", commands="serve --engine ray", extra="ray"),
    Feature(
        name="Slurm",
        commands="serve --engine slurm",
        programs=("sbatch", "squeue", "scontrol", "scancel"),
    ),
    Feature(name="clouds", commands="serve --market, through SkyPilot", extra="sky"),
    Feature(name="GPUs", commands="real devices on this machine", programs=("nvidia-smi",)),
)


@dataclass(frozen=True, slots=True, kw_only=True)
class Part:
    """One thing that a feature stands on."""

    name: str
    wanted: str  # bounds of the version, or "on PATH"
    found: str  # a version or a path; empty: it is not here
    is_right: bool


@dataclass(frozen=True, slots=True, kw_only=True)
class Finding:
    """Whether a feature works here, and what to do if not."""

    feature: Feature
    parts: tuple[Part, ...]
    fix: str

    @property
    def works(self) -> bool:
        """Whether nothing is missing; an extra that this release does not have is missing."""
        return bool(self.parts) and all(part.is_right for part in self.parts)


def examine() -> list[Finding]:
    """Every feature, with what it stands on."""
    needed = _requirements()
    findings = []
    for feature in FEATURES:
        packages = needed.get(feature.extra, {}) if feature.extra or not feature.programs else {}
        parts = (
            *(_package(name, bounds) for name, bounds in packages.items()),
            *(_program(name) for name in feature.programs),
        )
        findings.append(Finding(feature=feature, parts=parts, fix=_fix(feature, parts)))
    return findings


def is_within(found: str, bounds: str) -> bool:
    """Whether a version keeps bounds such as `>=1.26,<3`; what cannot be read is let pass."""
    have = _numbers(found)
    for bound in bounds.split(","):
        match = _BOUND.match(bound)
        if match and not _COMPARE[match[1]](have, _numbers(match[2])):
            return False
    return True


def _numbers(text: str) -> tuple[int, ...]:
    match = re.match(r"\d+(?:\.\d+)*", text)
    return tuple(int(part) for part in match[0].split(".")) if match else ()


def _requirements() -> dict[str, dict[str, str]]:
    """By extra ("" is the core): packages and the bounds of their versions."""
    found: dict[str, dict[str, str]] = {}
    for line in requires("drystone") or []:
        match = _REQUIREMENT.match(line.strip())
        if match is None:
            continue
        extra = re.search(r"extra\s*==\s*['\"]([^'\"]+)", match["mark"] or "")
        found.setdefault(extra[1] if extra else "", {})[match["name"]] = match["bounds"].strip()
    return found


def _package(name: str, bounds: str) -> Part:
    try:
        found = version(name)
    except PackageNotFoundError:
        found = ""
    is_right = bool(found) and is_within(found, bounds)
    return Part(name=name, wanted=bounds or "any", found=found, is_right=is_right)


def _program(name: str) -> Part:
    path = shutil.which(name) or ""
    return Part(name=name, wanted="on PATH", found=path, is_right=bool(path))


def _fix(feature: Feature, parts: tuple[Part, ...]) -> str:
    if parts and all(part.is_right for part in parts):
        return ""
    if feature.extra:
        return f"pip install 'drystone[{feature.extra}]'"
    missing = ", ".join(part.name for part in parts if not part.is_right)
    return f"put {missing} on PATH" if feature.programs else f"install again: {missing}"


def doctor(
    as_json: Annotated[bool, typer.Option("--json", help="Print JSON instead of a table.")] = False,
) -> None:
    """Say what is installed, missing, and which devices are here.

    Ends with 0 if the core is whole; what else is missing is told with the command that adds it.

    With --json: {"version", "python", "features": [{name, works, commands, fix, parts: [{name,
    wanted, found, is_right}]}], "devices": {"gpus": [names], "cores", "memory_bytes", "emulates"},
    "controller": {"folder", "answers"}}.
    """
    from drystone.cli.doctor import examine

    findings = examine()
    told = {
        **_about(),
        "features": [_as_dict(finding) for finding in findings],
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

    from drystone.run.engines.local import local_gpus

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
            feature["name"],
            "works" if feature["works"] else "missing",
            feature["commands"],
            ", ".join(_part(part) for part in feature["parts"]),
            feature["fix"] or "-",
        )
        for feature in told["features"]
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
