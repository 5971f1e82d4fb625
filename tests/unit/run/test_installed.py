"""What is installed is read from the package's own requirements; nothing is imported."""

import subprocess
import sys
from importlib.util import find_spec

import pytest

from drystone.cli.doctor import FEATURES, examine, is_within


@pytest.mark.parametrize(
    ("found", "bounds", "is_right"),
    [
        ("2.13.0", "==2.13.0", True),
        ("2.13.0+cpu", "==2.13.0", True),
        ("2.12.1", "==2.13.0", False),
        ("1.26", ">=1.26,<3", True),
        ("3.0", ">=1.26,<3", False),
        ("0.9", ">=1.26,<3", False),
        ("9", "", True),
    ],
)
def test_versions_keep_bounds(found: str, bounds: str, is_right: bool):
    assert is_within(found, bounds) is is_right


def test_the_core_and_what_the_tests_need_work_here():
    works = {one.feature.name: one for one in examine()}

    assert works["core"].works
    assert {part.name for part in works["core"].parts} >= {"numpy", "typer", "fastapi"}
    assert works["plots"].works
    assert works["training"].works == (find_spec("torch") is not None)
    assert all(one.works == (one.fix == "") for one in works.values())
    assert list(works) == [feature.name for feature in FEATURES]


def test_a_feature_that_misses_something_says_how_to_add_it(monkeypatch: pytest.MonkeyPatch):
    monkeypatch.setenv("PATH", "")
    slurm = next(one for one in examine() if one.feature.name == "Slurm")

    assert not slurm.works
    assert "sbatch" in slurm.fix


def test_looking_imports_nothing_heavy():
    code = (
        "import sys; from drystone.cli.doctor import examine; examine();"
        "sys.exit(any(m in sys.modules for m in ('torch', 'ray', 'sky', 'matplotlib')))"
    )
    assert subprocess.run([sys.executable, "-c", code], check=False).returncode == 0
