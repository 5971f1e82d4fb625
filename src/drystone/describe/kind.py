"""What a run has in common with others: its launcher, GPU type, family of models, work, itself."""

from __future__ import annotations

from typing import NamedTuple


class Kind(NamedTuple):
    """What a run has in common with others, the most general first; "" has nothing in common."""

    launcher: str
    gpu: str
    family: str
    work: str
    run: str
