"""What happened: events, never changed, with a JSON form that reads back to the same event.

An event says all that is needed to fold it into the state (`run/state.py`): a start carries the
speed and the time from which it counts, an end carries nothing more than its time.
"""

from __future__ import annotations

import dataclasses
import json
import math
from collections.abc import Iterable, Iterator
from types import MappingProxyType
from typing import Any, Final

import msgspec

from drystone.describe.cluster import NodeSpec
from drystone.describe.job import JobSpec
from drystone.errors import DrystoneError, UnknownName, UnreadableFile
from drystone.schedule.snapshot import Placement

_ENCODER: Final = json.JSONEncoder(allow_nan=False)


class UnwritableEvent(DrystoneError):
    """An event holds what no log can keep; nothing was written."""


class Event(msgspec.Struct, frozen=True, gc=False):
    """Something that happened at a time.

    A simulation makes hundreds of thousands: a Struct is made without a line of Python, cannot be
    changed, and holds nothing that could lead back to it, so the collector need not look at it.
    Fields go by their names; only where every job passes, in the order of their declaration.
    """

    time_seconds: float


class Submitted(Event, frozen=True):
    """A job came in."""

    job: JobSpec


class Started(Event, frozen=True):
    """A job got GPUs; its progress counts from `productive_seconds` on."""

    job_id: str
    option: int
    placement: Placement
    samples_per_second: float
    productive_seconds: float
    reason: str = ""


class SpeedChanged(Event, frozen=True):
    """A running job goes faster or slower than before."""

    job_id: str
    samples_per_second: float


class PhaseChanged(SpeedChanged, frozen=True):
    """A running job has done the work of a phase and goes on in the next one."""

    phase: int
    done_samples: float


class Progressed(Event, frozen=True):
    """How far a job really is: reported by a run, or what its last checkpoint holds."""

    job_id: str
    done_samples: float
    samples_per_second: float = 0.0  # measured; 0 for a job that does not run


class Stopped(Event, frozen=True):
    """A decision took a job's GPUs; its progress is kept."""

    job_id: str
    reason: str = ""


class Interrupted(Event, frozen=True):
    """A job lost its GPUs to a fault, and its progress since the last checkpoint."""

    job_id: str
    lost_samples: float
    reason: str = ""
    kind: str = ""  # of the fault, where it is known
    retry_seconds: float = 0.0  # the time from which it may be tried again


class StartFailed(Event, frozen=True):
    """A job that was given GPUs did not come up."""

    job_id: str
    reason: str = ""


class Finished(Event, frozen=True):
    """A job did all its work."""

    job_id: str


class Refused(Event, frozen=True):
    """A job was turned away."""

    job_id: str
    reason: str = ""


class Cancelled(Event, frozen=True):
    """The owner of a job took it back."""

    job_id: str


class Paused(Event, frozen=True):
    """Somebody wants a job to wait, whatever is free; its GPUs are taken if it has any."""

    job_id: str
    reason: str = ""


class Unpaused(Event, frozen=True):
    """A paused job may run again."""

    job_id: str


class Failed(Event, frozen=True):
    """A job ended without its work being done, for a reason that trying again does not mend."""

    job_id: str
    reason: str = ""
    kind: str = ""  # of the fault


class NodeLost(Event, frozen=True):
    """A node is gone; the jobs on it are interrupted by events of their own, before this one."""

    node: int


class NodeBack(Event, frozen=True):
    """A lost node can be used again."""

    node: int


class NodeAdded(Event, frozen=True):
    """A node joined the cluster; nobody rented it."""

    node: int  # its row: a new one, or that of a node of the same GPU type which is gone
    spec: NodeSpec


class NodeRemoved(Event, frozen=True):
    """A node left for good; the jobs on it were interrupted before."""

    node: int
    reason: str = ""


class NodeSlowed(Event, frozen=True):
    """A node runs at this share of its speed; 1 is its full speed again."""

    node: int
    speed_share: float


class RentalAsked(Event, frozen=True):
    """Nodes of an offer were asked for; each has a number, counted over all of them."""

    offer: str
    num_nodes: int
    first_rental: int
    ready_seconds: float  # when they should be here
    reason: str = ""


class RentalFailed(Event, frozen=True):
    """A node that was asked for will not come: there was none left."""

    rental: int
    offer: str
    reason: str = ""


class NodeJoined(Event, frozen=True):
    """A rented node can be used, and is paid for from now on."""

    node: int  # its row: a new one, or that of an earlier node of the same offer
    rental: int
    offer: str
    spec: NodeSpec
    price_dollars_per_hour: float
    billed_since_seconds: float = 0.0  # where the provider counts from earlier; 0: from now on


class ReleaseAsked(Event, frozen=True):
    """A rented node is to be given back: nothing starts there, and it costs until it is gone."""

    node: int
    reason: str = ""


class NodeReleased(Event, frozen=True):
    """A rented node was given back."""

    node: int
    reason: str = ""


class NodeReclaimed(Event, frozen=True):
    """Its owner took a rented node back; the jobs on it were interrupted before."""

    node: int
    reason: str = ""


class PriceChanged(Event, frozen=True):
    """An offer costs more or less from now on, also for its nodes that are rented."""

    offer: str
    price_dollars_per_hour: float


class BillSettled(Event, frozen=True):
    """What the provider billed for a rental in all, once it is over; it counts, not our clock."""

    rental: int
    offer: str
    micro_dollars: int


KINDS: Final = MappingProxyType(
    {
        kind.__name__: kind
        for kind in (
            NodeAdded, NodeRemoved,
            Submitted, Started, SpeedChanged, PhaseChanged, Stopped, Interrupted, StartFailed,
            Finished, Refused, Cancelled, Progressed, Paused, Unpaused, Failed, NodeLost, NodeBack,
            NodeSlowed, RentalAsked, RentalFailed, NodeJoined, ReleaseAsked, NodeReleased,
            NodeReclaimed, PriceChanged, BillSettled,
        )
    }
)  # fmt: skip


def render_event(event: Event) -> str:
    """One line of JSON."""
    fields = {name: getattr(event, name) for name in event.__struct_fields__}
    if isinstance(event, Submitted):
        job = dataclasses.asdict(event.job) | {"allowed_gpus": sorted(event.job.allowed_gpus)}
        # JSON knows no infinity; a limit that is left out is no limit.
        fields["job"] = {name: value for name, value in job.items() if value != math.inf}
    if isinstance(event, NodeJoined | NodeAdded):
        fields["spec"] = dataclasses.asdict(event.spec)
    return dump_line(event, fields)


def dump_line(event: Event, fields: dict[str, Any]) -> str:
    """An event as one line of JSON, which knows no infinity: nobody could read it back."""
    try:
        return _ENCODER.encode({"event": type(event).__name__} | fields)
    except ValueError as error:
        raise UnwritableEvent(f"{type(event).__name__} cannot be written: {error}") from None


def load_line(line: str) -> dict[str, Any]:
    """What a line of a log says, as plain values; all its numbers are finite.

    Logs of earlier versions may hold infinities: a speed that is none is 0 (not measured), and one
    of several numbers is left out.
    """
    table: dict[str, Any] = json.loads(line)
    if not isinstance(table, dict):
        raise UnreadableFile(f"not an event: {line[:80]!r}")
    if "Infinity" in line or "NaN" in line:
        return {name: _without_infinities(value) for name, value in table.items()}
    return table


def _without_infinities(value: Any) -> Any:
    if isinstance(value, dict):
        found = {name: _without_infinities(one) for name, one in value.items()}
        return {name: one for name, one in found.items() if _is_finite(value[name])}
    if isinstance(value, list):
        return [_without_infinities(one) for one in value]
    return value if _is_finite(value) else 0.0


def _is_finite(value: Any) -> bool:
    return not isinstance(value, float) or math.isfinite(value)


def parse_event(line: str) -> Event:
    """The event that a line of JSON says."""
    try:
        fields = load_line(line)
        name = str(fields.pop("event"))
    except (ValueError, KeyError, TypeError, AttributeError) as error:
        raise UnreadableFile(f"not an event: {line[:80]!r}") from error
    if name not in KINDS:
        raise UnknownName("event", name, KINDS)
    if "placement" in fields:
        fields["placement"] = tuple((int(node), int(count)) for node, count in fields["placement"])
    if "job" in fields:
        job = fields["job"]
        fields["job"] = JobSpec(**(job | {"allowed_gpus": frozenset(job["allowed_gpus"])}))
    if "spec" in fields:
        fields["spec"] = NodeSpec(**fields["spec"])
    event: Event = KINDS[name](**fields)
    return event


def parse_events(lines: Iterable[str]) -> Iterator[Event]:
    """The events of a log, one a line."""
    return (parse_event(line) for line in lines if line.strip())
