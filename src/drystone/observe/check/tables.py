"""Where the published measurements are that ship with Drystone.

Readings of memory and speed that other people took and published, each row with its source, place
and licence. Rows whose configuration is incomplete, or whose source has no licence, are left out.
"""

from __future__ import annotations

from pathlib import Path
from typing import Final

_FOLDER: Final = Path(__file__).parent / "data"
MEMORY_TABLE: Final = _FOLDER / "memory_runs.csv"
SPEED_TABLE: Final = _FOLDER / "speed_runs.csv"
