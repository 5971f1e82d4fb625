"""Which licences does what we install have? `python locks/licences.py` writes `LICENSES.md`.

Names and versions are those of the lock, licences what each package says of itself: run it in
`.venv` after `make lock`. `tests/test_supply.py` says which licences will do.
"""

from __future__ import annotations

import re
from importlib.metadata import PackageNotFoundError, metadata
from pathlib import Path

HERE = Path(__file__).parent
HEAD = """# Licences

What `drystone` itself needs (`core.txt`), and what each package says its licence is.
Written by `python locks/licences.py`. Files of others that we ship are in `vendored.sha256`.

| package | version | licence |
|---|---|---|
"""


def locked(name: str) -> dict[str, str]:
    """Versions by package, as a lock file has them."""
    text = (HERE / name).read_text(encoding="utf-8")
    return dict(re.findall(r"^([A-Za-z0-9._-]+)==([^\s;\\]+)", text, flags=re.MULTILINE))


def licence_of(package: str) -> str:
    """In the package's own words; empty where it is not installed here."""
    try:
        told = metadata(package)
    except PackageNotFoundError:
        return ""
    if told.get("License-Expression"):
        return str(told["License-Expression"])
    kinds = [text for text in told.get_all("Classifier") or () if text.startswith("License ::")]
    names = [text.rpartition(" :: ")[2] for text in kinds if text.count("::") > 1]
    first = str(told.get("License") or "").strip().splitlines()
    return ", ".join(names) or (first[0] if first else "unknown")


def rows() -> list[str]:
    """A line of the table for each package."""
    packages = sorted(locked("core.txt").items())
    return [
        f"| {name} | {version} | {licence_of(name) or 'not on this platform'} |"
        for name, version in packages
    ]


if __name__ == "__main__":
    (HERE / "LICENSES.md").write_text(HEAD + "\n".join(rows()) + "\n", encoding="utf-8")
