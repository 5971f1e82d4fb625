"""What is installed here, and which feature lacks what? Nothing is imported to find out."""

from __future__ import annotations

import re
import shutil
from collections.abc import Callable, Mapping
from dataclasses import dataclass
from importlib.metadata import PackageNotFoundError, requires, version
from typing import Final

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
    return tuple(int(one) for one in match[0].split(".")) if match else ()


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
