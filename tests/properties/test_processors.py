"""Does a policy decide the same on every processor? Sums are made in other orders on each."""

import os
import subprocess
import sys
from pathlib import Path

import pytest

ROOT = Path(__file__).parents[2]
# As on older processors: OpenBLAS chooses its kernels by the first, NumPy leaves out those of the
# second where it knows them (a name that it does not know is a warning).
OLDER = (
    {"OPENBLAS_CORETYPE": "Haswell"},
    {"OPENBLAS_CORETYPE": "Sandybridge", "NPY_DISABLE_CPU_FEATURES": "X86_V4 AVX512_ICL X86_V3"},
)


def event_log(tmp_path: Path, name: str, environment: dict[str, str]) -> str:
    """A run of `prices` in a process of its own."""
    file = tmp_path / name
    subprocess.run(
        [
            sys.executable, "-m", "drystone", "simulate", "--policy", "prices",
            "--trace", "examples/simulate/jobs.csv",
            "--cluster", "examples/simulate/cluster.yaml", "--save-log", str(file),
        ],
        check=True, capture_output=True, cwd=ROOT, env=os.environ | environment,
    )  # fmt: skip
    return next(tmp_path.glob(f"{name}*.jsonl")).read_text(encoding="utf-8")


@pytest.mark.slow
@pytest.mark.parametrize("older", OLDER, ids=lambda one: one["OPENBLAS_CORETYPE"])
def test_prices_decides_the_same_on_every_processor(tmp_path, older):
    assert event_log(tmp_path, "here", {}) == event_log(tmp_path, "older", older)
