"""A running system for tests; `systems.py` beside this file can be imported by them."""

import sys
from pathlib import Path

import pytest

sys.path.insert(0, str(Path(__file__).parent))

from systems import running


@pytest.fixture
def system(tmp_path):
    with running(tmp_path / "s") as made:
        yield made
