"""Words for reasons that policies share: GPUs of an option, and one option beside another."""

from __future__ import annotations

from typing import Final

from drystone.schedule.snapshot import Snapshot


def name_gpus(snapshot: Snapshot, row: int, option: int) -> str:
    """GPUs of an option: "2 A100-80GB-SXM + 1 T4-16GB"."""
    counts = snapshot.counts(row, option).tolist()
    pairs = zip(counts, snapshot.gpu_types, strict=True)
    return " + ".join(f"{count} {gpu}" for count, gpu in pairs if count)


NO_CHOICE: Final = "it has no other option now"


def speed_words(snapshot: Snapshot, row: int, option: int, other: int, ratio: float) -> str:
    """How fast an option is beside another: "2 A are 4.1 times as fast as 2 T"."""
    gpus, others = name_gpus(snapshot, row, option), name_gpus(snapshot, row, other)
    is_one = gpus.startswith("1 ") and " + " not in gpus
    if ratio >= 1:
        return f"{gpus} {'is' if is_one else 'are'} {ratio:.3g} times as fast as {others}"
    return f"{gpus} {'has' if is_one else 'have'} {ratio:.0%} of the speed of {others}"


def cost_words(ratio: float, what: str) -> str:
    """What it costs beside another: " for 1.3 times the price"."""
    if f"{ratio:.3g}" == "1":
        return f" for the same {what}"
    times = f"{ratio:.3g} times" if ratio >= 1 else f"{ratio:.0%} of"
    return f" for {times} the {what}"
