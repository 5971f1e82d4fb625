"""Every numbered example prints what stands in examples/expected.

DRYSTONE_WRITE_EXPECTED=1 writes what they print now; look at the difference before it is committed.
"""

import os
import subprocess
import sys
from pathlib import Path

import pytest

FOLDER = Path(__file__).resolve().parents[1] / "examples"
EXAMPLES = sorted(FOLDER.glob("[0-9][0-9]_*.py"))


def test_they_are_numbered_without_a_gap():
    assert [int(path.name[:2]) for path in EXAMPLES] == list(range(1, 10))
    assert {path.stem for path in EXAMPLES} == {
        path.stem for path in (FOLDER / "expected").glob("*.txt")
    }


@pytest.mark.slow
@pytest.mark.parametrize("example", EXAMPLES, ids=lambda path: path.stem)
def test_an_example_prints_what_is_expected(example: Path, tmp_path: Path):
    run = subprocess.run(
        [sys.executable, str(example)],
        cwd=tmp_path, capture_output=True, text=True, check=False, timeout=550,
        env=os.environ | {"OMP_NUM_THREADS": "1"},
    )  # fmt: skip

    assert run.returncode == 0, run.stderr[-3000:]
    expected = FOLDER / "expected" / f"{example.stem}.txt"
    if os.environ.get("DRYSTONE_WRITE_EXPECTED"):
        expected.write_text(run.stdout, encoding="utf-8")
    assert run.stdout == expected.read_text(encoding="utf-8")
