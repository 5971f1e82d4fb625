"""What happened around jobs and nodes that a real system must remember, and the one log of both.

`run/events.py` holds what changes the state that policies see. A note changes what else is known: a
job's description, a node that is drained, what was learned. Both go into one log, one line each.
"""

from __future__ import annotations

import dataclasses
from collections.abc import Mapping
from typing import Any, Final

import msgspec

from drystone.describe.files.json_shapes import to_plain
from drystone.describe.job import TrainConfig, TrainingJob
from drystone.describe.model import ModuleSpec
from drystone.describe.patience import JobPatience
from drystone.describe.recipe import Lora
from drystone.errors import InvalidSpec, UnreadableFile
from drystone.run.events import Event, dump_line, load_line, parse_event, render_event


class Note(Event, frozen=True, forbid_unknown_fields=True):
    """Something to remember that does not change the state of the cluster."""


class Described(Note, frozen=True):
    """What was submitted, in full; stands right before the job's `Submitted`."""

    job_id: str
    job: TrainingJob
    client_key: str = ""


class ClusterDescribed(Note, frozen=True):
    """From now on these are the nodes, (id, GPU type, GPUs) each, and what a GPU hour costs."""

    nodes: tuple[tuple[str, str, int], ...]
    dollars_per_gpu_hour: tuple[tuple[str, float], ...] = ()


class MarketDescribed(Note, frozen=True):
    """From now on this can be rented, (name, GPU type, GPUs, dollars an hour) each, for so much.

    `fleet` begins the token of every rental of this log; it never changes.
    """

    fleet: str
    offers: tuple[tuple[str, str, int, float], ...]
    budget_dollars_per_hour: float | None = None  # on average; None: no limit
    hard_cap_dollars_per_hour: float | None = None

    def says_as(self, other: MarketDescribed) -> bool:
        """Whether both say the same, whenever it was."""
        return msgspec.structs.replace(self, time_seconds=other.time_seconds) == other


class Drained(Note, frozen=True):
    """Nothing more is to start on a node."""

    node: str
    reason: str = ""  # empty: somebody asked for it
    blamed_by: str = ""  # the job that met its broken hardware


class Undrained(Note, frozen=True):
    """A drained node may be used again."""

    node: str


class Launched(Note, frozen=True):
    """The processes of a start were asked for: which plan, on which devices."""

    job_id: str
    epoch: int
    plan: str  # in a few words
    devices: tuple[tuple[str, int], ...]  # (node, device) of each rank
    replaces: int = 0  # the launch that trains on until this one is up; 0: none


class Learned(Note, frozen=True):
    """What a run taught about jobs that do the same work: a speed, or memory that was too small."""

    job_id: str
    work: str  # jobs with the same one do the same work
    gpus: tuple[tuple[str, int], ...]  # by type
    estimated_samples_per_second: float
    measured_samples_per_second: float = 0.0  # 0: none was measured
    memory_share: float = 0.0  # it needs more than this many times the estimate; 0: nothing new
    # by GPU type: micro-batch, and seconds that ranks computed on it over the formulas'
    paces: tuple[tuple[str, int, float], ...] = ()
    # plans that a launch tried for a few steps: words, estimated and measured seconds of a step
    trials: tuple[tuple[str, float, float], ...] = ()
    kept: str = ""  # the words of the fastest of them


class Decided(Note, frozen=True):
    """Why a policy did what it did to a job: the numbers behind its sentence."""

    job_id: str
    decision: str
    reason: str
    numbers: Mapping[str, float] = {}  # every one gets its own


class Remembered(Note, frozen=True):
    """What a policy remembers from one decision to the next, as text (`policy_memory`)."""

    policy: str
    setting: str  # with which it was: under another one it means nothing
    memory: str


class FilesKept(Note, frozen=True):
    """From now on the files of jobs, checkpoints above all, are in the folder with this name."""

    folder_id: str  # as the folder itself says it (`folder.py`)


class Warned(Note, frozen=True):
    """Something about a job that its owner should know, though it goes on."""

    job_id: str
    reason: str


class TokenMade(Note, frozen=True):
    """Somebody may ask things over the network from now on; of the secret only a hash is kept."""

    token_id: str
    name: str  # of its owner
    role: str
    team: str
    secret_sha256: str


class TokenRevoked(Note, frozen=True):
    """A token is worth nothing any more."""

    token_id: str


class TeamSet(Note, frozen=True):
    """A team, and its limits from now on; None is no limit."""

    name: str
    quota: float | None = None  # GPUs of the most valuable type
    budget_dollars: float | None = None
    budget_period: str = "month"


NOTES: Final = {
    kind.__name__: kind
    for kind in (
        Described, ClusterDescribed, Drained, Undrained, Launched, Learned, Decided, TokenMade,
        TokenRevoked, TeamSet, MarketDescribed, Remembered, FilesKept, Warned,
    )
}  # fmt: skip


def render(event: Event) -> str:
    """One line of JSON."""
    if not isinstance(event, Note):
        return render_event(event)
    fields = {name: to_plain(getattr(event, name)) for name in event.__struct_fields__}
    return dump_line(event, fields)


def parse(line: str) -> Event:
    """The event or note that a line says."""
    try:
        table = load_line(line)
        kind = NOTES.get(table["event"])
    except (ValueError, KeyError, TypeError) as error:
        raise UnreadableFile(f"not an event: {line[:80]!r}") from error
    if kind is None:
        return parse_event(line)
    del table["event"]
    if kind is Decided:
        return Decided(**table)
    if kind is Described:
        return Described(**(table | {"job": _read_job(table["job"])}))
    try:
        note: Note = msgspec.convert(table, kind)
    except msgspec.ValidationError as error:
        raise InvalidSpec(str(error), where=f"event {kind.__name__}") from None
    return note


def parse_numbered(sequence: int, line: str) -> Event:
    """The same, of a line of the log; says which one it is that cannot be read."""
    try:
        return parse(line)
    except Exception as error:  # whatever a damaged line makes of a reader
        raise log_damage(sequence, error) from None


def log_damage(sequence: int, error: Exception) -> UnreadableFile:
    """An event that cannot be read, or cannot follow what came before: which, and what to do."""
    text = f"event {sequence} of the log is damaged or impossible: {type(error).__name__}: {error}"
    hint = "`drystone log check` names all such events, `drystone log repair` puts them aside"
    return UnreadableFile(text, hint=hint)


def _read_job(table: dict[str, Any]) -> TrainingJob:
    """A description, without the checks of `from_plain`: it is our own writing, and there are many.

    Keys that a later version has are an error all the same.
    """
    given = dict(table)
    if "train" not in given:  # older logs have these options beside the others
        names = [option.name for option in dataclasses.fields(TrainConfig)]
        given["train"] = {name: given.pop(name) for name in names if name in given}
    try:
        given["train"] = TrainConfig(**given["train"])
        if "patience" in given:
            given["patience"] = JobPatience(**given["patience"])
        if "lora" in given:
            lora = given["lora"]
            given["lora"] = Lora(**{**lora, "targets": tuple(lora["targets"])})
        module = given.get("module")  # older logs have none
        given["module"] = ModuleSpec(**module) if module else None
        given["environment"] = tuple((name, value) for name, value in given["environment"])
        for name in ("allowed_gpus", "denied_gpus", "command"):
            given[name] = tuple(given[name])
        return TrainingJob(**given)
    except TypeError as error:
        raise UnreadableFile(f"not a description of a job: {error}") from None


def job_of(event: Event) -> str:
    """The job that an event is about; empty where it is about none."""
    job = getattr(event, "job", None)
    job_id: str = getattr(event, "job_id", "") or getattr(job, "id", "")
    return job_id
