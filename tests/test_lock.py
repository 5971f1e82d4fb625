"""The lock covers what the project asks for, exactly, and `make` installs nothing beside it."""

import re
import tomllib
from pathlib import Path

import pytest
from packaging.requirements import Requirement
from packaging.utils import canonicalize_name

ROOT = Path(__file__).resolve().parents[1]
PROJECT = tomllib.loads((ROOT / "pyproject.toml").read_text())
EXTRAS = PROJECT["project"]["optional-dependencies"]
# What `make` installs: `sky` holds back what others need, so it is never installed beside them.
LOCKED_EXTRAS = sorted(set(EXTRAS) - {"sky"})
PYTHONS = ("3.11", "3.12", "3.13")


def lock_entries(name: str) -> list[tuple[Requirement, list[str]]]:
    """Each requirement of a lock file, with its hashes."""
    text = (ROOT / "locks" / name).read_text().replace("\\\n", " ")
    entries = []
    for line in text.splitlines():
        asked, *hashes = re.split(r"\s--hash=", line)
        entries.append((Requirement(asked.strip()), [text.strip() for text in hashes]))
    return entries


def versions(name: str, *, python: str) -> dict[str, str]:
    """Locked versions by name, on Linux and one Python."""
    environment = {
        "python_version": python,
        "python_full_version": f"{python}.5",
        "sys_platform": "linux",
        "platform_system": "Linux",
        "platform_machine": "x86_64",
        "platform_python_implementation": "CPython",
        "implementation_name": "cpython",
        "os_name": "posix",
    }
    found = {}
    for asked, _ in lock_entries(name):
        if asked.marker is None or asked.marker.evaluate(environment):
            key = canonicalize_name(asked.name)
            assert key not in found, f"{name}: two versions of {key} on Python {python}"
            found[key] = next(iter(asked.specifier)).version
    return found


@pytest.mark.parametrize("name", ["core.txt", "dev.txt"])
def test_every_entry_has_one_exact_version_and_hashes(name: str):
    for asked, hashes in lock_entries(name):
        assert [part.operator for part in asked.specifier] == ["=="], asked
        assert hashes, asked
        assert all(re.fullmatch(r"sha256:[0-9a-f]{64}", text) for text in hashes), asked


@pytest.mark.parametrize("name", ["core.txt", "dev.txt", "torch.txt"])
def test_no_host_and_no_path_stands_in_the_lock(name: str):
    text = (ROOT / "locks" / name).read_text()

    assert not re.search(r"https?:|file:|^-|@ |(^|\s)/", text, flags=re.MULTILINE)


@pytest.mark.parametrize("python", PYTHONS)
@pytest.mark.parametrize("extra", ["", *LOCKED_EXTRAS])
def test_the_lock_satisfies_what_the_project_asks_for(extra: str, python: str):
    lines = EXTRAS[extra] if extra else PROJECT["project"]["dependencies"]
    name = "core.txt" if extra in {"", "plots", "runtime"} else "dev.txt"
    locked = versions(name, python=python)
    for asked in map(Requirement, lines):
        if asked.name != "torch":
            assert asked.specifier.contains(locked[canonicalize_name(asked.name)]), asked


@pytest.mark.parametrize("python", PYTHONS)
def test_the_demo_and_the_tests_stand_on_the_same_versions(python: str):
    core, dev = versions("core.txt", python=python), versions("dev.txt", python=python)
    below_torch = versions("torch.txt", python=python)

    assert core.items() <= dev.items()
    assert {key: dev[key] for key in below_torch if key in dev}.items() <= below_torch.items()


def test_what_builds_the_project_is_locked():
    locked = versions("core.txt", python="3.11")
    (asked,) = map(Requirement, PROJECT["build-system"]["requires"])

    assert asked.specifier.contains(locked[asked.name])
    assert "editables" in locked


def test_make_installs_nothing_that_is_not_locked():
    installs = re.findall(r"^\t\$\(PIP\) (.*)$", (ROOT / "Makefile").read_text(), re.MULTILINE)
    (torch,) = (line for line in EXTRAS["runtime"] if line.startswith("torch"))

    assert sorted(installs) == sorted(
        [
            "--no-deps --require-hashes --requirement locks/core.txt",
            "--no-deps --require-hashes --requirement locks/dev.txt",
            f"--constraint locks/torch.txt {torch}",
            "--no-deps --no-build-isolation --editable .",
        ]
    )


def test_pip_elsewhere_in_the_makefile_is_an_error():
    lines = (ROOT / "Makefile").read_text().splitlines()

    assert [line for line in lines if "pip install" in line and not line.startswith("PIP :=")] == []
