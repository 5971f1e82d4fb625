"""Which names may a shell offer at a Tab: models, GPU types, policies, words of a short list?"""

from __future__ import annotations

import re
from collections.abc import Callable, Iterable


def complete_models(incomplete: str) -> list[str]:
    """Models that are known by name."""
    from drystone.describe.model_source import model_names

    return _starting(incomplete, model_names())


def complete_gpus(incomplete: str) -> list[str]:
    """GPU types of the catalogue; what is typed keeps its case, of which names are free."""
    from drystone.describe.catalogue import gpu_names

    typed = len(incomplete)
    begun = [one for one in gpu_names() if one[:typed].lower() == incomplete.lower()]
    return [incomplete + one[typed:] for one in begun]


def complete_pool(incomplete: str) -> list[str]:
    """The last of several GPU types with their counts: `8xA100-80GB-SXM,4xV1`."""
    match = re.fullmatch(r"(.*,)?(\d+\s*[xX*]\s*)?([^,]*)", incomplete)
    before, count, name = match.groups("") if match else ("", "", incomplete)
    return [f"{before}{count}{one}" for one in complete_gpus(name)]


def complete_policies(incomplete: str) -> list[str]:
    """The last of several policies: `prices,ce`."""
    from drystone.schedule.decision import POLICIES

    before, comma, last = incomplete.rpartition(",")
    return [f"{before}{comma}{one}" for one in _starting(last, POLICIES)]


def words(*known: str) -> Callable[[str], list[str]]:
    """One of a few words."""

    def complete(incomplete: str) -> list[str]:
        return _starting(incomplete, known)

    return complete


def _starting(incomplete: str, known: Iterable[str]) -> list[str]:
    return [one for one in known if one.startswith(incomplete)]
