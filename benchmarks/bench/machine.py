"""On what was it measured? Processor, memory, versions: no names of hosts, no paths."""

from __future__ import annotations

import os
import platform
import subprocess
from importlib.metadata import PackageNotFoundError, version
from pathlib import Path

PACKAGES = ("numpy", "torch", "transformers", "highspy", "ray", "fastapi", "sqlalchemy")


def describe_machine() -> dict[str, str]:
    """What a reader needs to judge a figure, in the order in which it is shown."""
    memory = os.sysconf("SC_PAGE_SIZE") * os.sysconf("SC_PHYS_PAGES") / 2**30
    return {
        "processor": f"{_processor()}, {os.cpu_count()} cores",
        "memory": f"{memory:.0f} GiB",
        "GPUs": "none",
        "system": platform.system(),
        "Python": platform.python_version(),
        "packages": packages(),
    } | ({"GPUs": gpus} if (gpus := _gpus()) else {})


def packages() -> str:
    """Versions of what figures depend on."""
    return ", ".join(f"{name} {found}" for name in PACKAGES if (found := _version(name)))


def source_version(root: Path) -> str:
    """The commit that was measured, and whether files differed from it; empty outside of git."""
    try:
        run = subprocess.run(
            ["git", "describe", "--always", "--dirty"], cwd=root, capture_output=True, text=True,
            check=False, timeout=30,
        )  # fmt: skip
    except OSError:
        return ""
    return run.stdout.strip().replace("-dirty", " and changes")


def _processor() -> str:
    try:
        lines = Path("/proc/cpuinfo").read_text(encoding="utf-8").splitlines()
    except OSError:
        return platform.processor() or platform.machine()
    names = [line.partition(":")[2].strip() for line in lines if line.startswith("model name")]
    return names[0] if names else platform.machine()


def _version(package: str) -> str:
    try:
        return version(package)
    except PackageNotFoundError:
        return ""


def _gpus() -> str:
    from drystone.run.engines.local import local_gpus

    return ", ".join(local_gpus())
