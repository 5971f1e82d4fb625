"""What happened: events, never changed, with a JSON form that reads back to the same event.

An event says all that is needed to fold it into the state (`run/state.py`): a start carries the
speed and the time from which it counts, an end carries nothing more than its time.
"""

from __future__ import annotations

import dataclasses
import json
import math
from collections.abc import Iterable, Iterator
from dataclasses import dataclass
from types import MappingProxyType
from typing import Any, Final, TypeVar, dataclass_transform

from drystone.describe.job import JobSpec
from drystone.describe.trace_cluster import NodeSpec
from drystone.errors import UnknownName, UnreadableFile
from drystone.schedule.snapshot import Placement

Kind = TypeVar("Kind")


@dataclass_transform(frozen_default=True)
def event_kind(kind: type[Kind]) -> type[Kind]:
    """A class of events: frozen for the type checker alone.

    A simulation makes hundreds of thousands of them, and a dataclass that is frozen while it runs
    sets every field through `object.__setattr__`, which takes several times as long. Fields go by
    their names; only where every job passes, in the order of their declaration, twice as quick.
    """
    return dataclass(slots=True, unsafe_hash=True)(kind)


@event_kind
class Event:
    """Something that happened at a time."""

    time_seconds: float


@event_kind
class Submitted(Event):
    """A job came in."""

    job: JobSpec


@event_kind
class Started(Event):
    """A job got GPUs; its progress counts from `productive_seconds` on."""

    job_id: str
    option: int
    placement: Placement
    samples_per_second: float
    productive_seconds: float
    reason: str = ""


@event_kind
class SpeedChanged(Event):
    """A running job goes faster or slower than before."""

    job_id: str
    samples_per_second: float


@event_kind
class PhaseChanged(SpeedChanged):
    """A running job has done the work of a phase and goes on in the next one."""

    phase: int
    done_samples: float


@event_kind
class Progressed(Event):
    """How far a job really is: reported by a run, or what its last checkpoint holds."""

    job_id: str
    done_samples: float
    samples_per_second: float = 0.0  # measured; 0 for a job that does not run


@event_kind
class Stopped(Event):
    """A decision took a job's GPUs; its progress is kept."""

    job_id: str
    reason: str = ""


@event_kind
class Interrupted(Event):
    """A job lost its GPUs to a fault, and its progress since the last checkpoint."""

    job_id: str
    lost_samples: float
    reason: str = ""
    kind: str = ""  # of the fault, where it is known
    retry_seconds: float = 0.0  # the time from which it may be tried again


@event_kind
class StartFailed(Event):
    """A job that was given GPUs did not come up."""

    job_id: str
    reason: str = ""


@event_kind
class Finished(Event):
    """A job did all its work."""

    job_id: str


@event_kind
class Refused(Event):
    """A job was turned away."""

    job_id: str
    reason: str = ""


@event_kind
class Cancelled(Event):
    """The owner of a job took it back."""

    job_id: str


@event_kind
class Paused(Event):
    """Somebody wants a job to wait, whatever is free; its GPUs are taken if it has any."""

    job_id: str
    reason: str = ""


@event_kind
class Unpaused(Event):
    """A paused job may run again."""

    job_id: str


@event_kind
class Failed(Event):
    """A job ended without its work being done, for a reason that trying again does not mend."""

    job_id: str
    reason: str = ""
    kind: str = ""  # of the fault


@event_kind
class NodeLost(Event):
    """A node is gone; the jobs on it are interrupted by events of their own, before this one."""

    node: int


@event_kind
class NodeBack(Event):
    """A lost node can be used again."""

    node: int


@event_kind
class NodeAdded(Event):
    """A node joined the cluster; nobody rented it."""

    node: int  # its row: a new one, or that of a node of the same GPU type which is gone
    spec: NodeSpec


@event_kind
class NodeRemoved(Event):
    """A node left for good; the jobs on it were interrupted before."""

    node: int
    reason: str = ""


@event_kind
class NodeSlowed(Event):
    """A node runs at this share of its speed; 1 is its full speed again."""

    node: int
    speed_share: float


@event_kind
class RentalAsked(Event):
    """Nodes of an offer were asked for; each has a number, counted over all of them."""

    offer: str
    num_nodes: int
    first_rental: int
    ready_seconds: float  # when they should be here
    reason: str = ""


@event_kind
class RentalFailed(Event):
    """A node that was asked for will not come: there was none left."""

    rental: int
    offer: str
    reason: str = ""


@event_kind
class NodeJoined(Event):
    """A rented node can be used, and is paid for from now on."""

    node: int  # its row: a new one, or that of an earlier node of the same offer
    rental: int
    offer: str
    spec: NodeSpec
    price_dollars_per_hour: float
    billed_since_seconds: float = 0.0  # where the provider counts from earlier; 0: from now on


@event_kind
class ReleaseAsked(Event):
    """A rented node is to be given back: nothing starts there, and it costs until it is gone."""

    node: int
    reason: str = ""


@event_kind
class NodeReleased(Event):
    """A rented node was given back."""

    node: int
    reason: str = ""


@event_kind
class NodeReclaimed(Event):
    """Its owner took a rented node back; the jobs on it were interrupted before."""

    node: int
    reason: str = ""


@event_kind
class PriceChanged(Event):
    """An offer costs more or less from now on, also for its nodes that are rented."""

    offer: str
    price_dollars_per_hour: float


@event_kind
class BillSettled(Event):
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
    fields = {one.name: getattr(event, one.name) for one in dataclasses.fields(event)}
    if isinstance(event, Submitted):
        job = dataclasses.asdict(event.job) | {"allowed_gpus": sorted(event.job.allowed_gpus)}
        # JSON knows no infinity; a limit that is left out is no limit.
        fields["job"] = {name: value for name, value in job.items() if value != math.inf}
    if isinstance(event, NodeJoined | NodeAdded):
        fields["spec"] = dataclasses.asdict(event.spec)
    return json.dumps({"event": type(event).__name__} | fields)


def parse_event(line: str) -> Event:
    """The event that a line of JSON says."""
    try:
        fields: dict[str, Any] = json.loads(line)
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
