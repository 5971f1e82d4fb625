"""Files beside this one can be imported; a cluster ends with the last test that needs it."""

import sys
from pathlib import Path

import pytest

sys.path.insert(0, str(Path(__file__).parent))


@pytest.hookimpl(trylast=True)  # when the fixtures have let go of it
def pytest_runtest_teardown(item, nextitem):
    """Nobody pays for Ray's daemons while the rest of the tests run."""
    is_over = nextitem is None or not _needs_ray(nextitem)
    if is_over and _needs_ray(item) and "ray_fixture" in sys.modules:
        sys.modules["ray_fixture"].close_shared()


def _needs_ray(item) -> bool:
    return any("engine-ray" in mark.args for mark in item.iter_markers("xdist_group"))
