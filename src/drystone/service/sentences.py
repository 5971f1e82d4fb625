"""Events in words: one phrase for each kind, for the page, `drystone events` and `drystone top`."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from types import MappingProxyType
from typing import Any, Final

from drystone.units import format_dollars

Table = Mapping[str, Any]

# Too frequent, or too technical, to be news; `drystone events --all` shows them.
QUIET: Final = frozenset(
    {
        "Progressed",
        "Described",
        "FilesKept",
        "Remembered",
        "SpeedChanged",
        "PhaseChanged",
        "Decided",
    }
)


def _because(event: Table) -> str:
    reason = str(event.get("reason") or "").partition("\n")[0]
    return f": {reason}" if reason else ""


def _learned(event: Table) -> str:
    measured = event.get("measured_samples_per_second")
    if trials := event.get("trials"):
        times = "; ".join(
            f"{words} {seconds:.3g} s (estimate {estimated:.3g})"
            for words, estimated, seconds in trials
        )
        return f"tried {len(trials)} plans and keeps {event.get('kept')}: {times}"
    if event.get("paces"):
        return "showed the pace of its kind of work on each GPU type"
    if not measured:
        return "showed that its kind of work needs more memory"
    gpus = " + ".join(f"{count} {gpu}" for gpu, count in event.get("gpus") or ())
    estimated = event.get("estimated_samples_per_second") or 0.0
    return f"ran at {measured:.3g} samples/s on {gpus}; the estimate was {estimated:.3g}"


def _priced(event: Table) -> str:
    return format_dollars(float(event.get("price_dollars_per_hour") or 0.0))


# Kinds of events that belong to a job read on after "Job 7"; the others are whole sentences.
PHRASES: Final[Mapping[str, Callable[[Table], str]]] = MappingProxyType(
    {
        "Submitted": lambda event: "was submitted",
        "Described": lambda event: "was described",
        "Started": lambda event: f"gets GPUs{_because(event)}",
        "Launched": lambda event: (
            f"starts on {event.get('plan') or 'its GPUs'}"
            + (", and trains where it was until that is up" if event.get("replaces") else "")
        ),
        "SpeedChanged": lambda event: f"runs at {event['samples_per_second']:.3g} samples/s",
        "PhaseChanged": lambda event: f"enters phase {event['phase']}",
        "Progressed": lambda event: (
            f"reports {event['samples_per_second']:.3g} samples/s"
            if event.get("samples_per_second")
            else "reports progress"
        ),
        "Stopped": lambda event: f"gives its GPUs back{_because(event)}",
        "Interrupted": lambda event: f"was interrupted{_because(event)}",
        "StartFailed": lambda event: f"did not start{_because(event)}",
        "Finished": lambda event: "is done",
        "Refused": lambda event: f"was refused{_because(event)}",
        "Cancelled": lambda event: "was cancelled",
        "Paused": lambda event: f"was paused{_because(event)}",
        "Unpaused": lambda event: "may run again",
        "Failed": lambda event: f"failed{_because(event)}",
        "Decided": lambda event: f"{str(event['decision']).lower()}{_because(event)}",
        "Learned": _learned,
        "NodeLost": lambda event: f"Node {event['node']} is lost",
        "NodeBack": lambda event: f"Node {event['node']} is back",
        "NodeAdded": lambda event: f"Node {event['spec']['id']} joined",
        "NodeRemoved": lambda event: f"Node {event['node']} left{_because(event)}",
        "NodeSlowed": lambda event: (
            f"Node {event['node']} runs at {event['speed_share']:.0%} of its speed"
        ),
        "Drained": lambda event: f"Node {event['node']} is drained{_because(event)}",
        "Undrained": lambda event: f"Node {event['node']} is used again",
        "ClusterDescribed": lambda event: f"The cluster has {len(event.get('nodes') or ())} nodes",
        "MarketDescribed": lambda event: (
            f"The market has {len(event.get('offers') or ())} kinds of nodes to rent"
        ),
        "RentalAsked": lambda event: (
            f"{event['num_nodes']} of {event['offer']} asked for{_because(event)}"
        ),
        "RentalFailed": lambda event: f"{event['offer']} could not be rented{_because(event)}",
        "NodeJoined": lambda event: f"Rented node {event['spec']['id']} joined",
        "ReleaseAsked": lambda event: f"Node {event['node']} is to be given back{_because(event)}",
        "NodeReleased": lambda event: f"Node {event['node']} was given back{_because(event)}",
        "NodeReclaimed": lambda event: f"Node {event['node']} was taken back{_because(event)}",
        "PriceChanged": lambda event: f"{event['offer']} now costs {_priced(event)} an hour",
        "BillSettled": lambda event: (
            f"{event['offer']}: {format_dollars(event['micro_dollars'] / 1e6)} paid"
        ),
        "FilesKept": lambda event: "The files of jobs are kept in this folder",
        "Warned": lambda event: f"has a warning{_because(event)}",
        "Remembered": lambda event: "The policy wrote down what it has learned",
        "TokenMade": lambda event: f"A token was made: {event['name']} ({event['role']})",
        "TokenRevoked": lambda event: "A token was revoked",
        "TeamSet": lambda event: f"Team {event['name']} was set",
    }
)


def phrase_of(event: Table) -> str:
    """What happened. Of a job the rest of a sentence that begins with it, else a whole one."""
    kind = str(event["event"])
    phrase = PHRASES.get(kind)
    if phrase is None:  # an event of another version, shown by name rather than not at all
        return kind
    try:
        return phrase(event)
    except (KeyError, TypeError, ValueError):  # one of another version may lack a field
        return kind


def job_of(event: Table) -> str:
    """The number of the job that an event belongs to; empty: none."""
    job = event.get("job")
    return str(event.get("job_id") or (job.get("id", "") if isinstance(job, dict) else ""))
