"""The shapes of requests and answers, as OpenAPI describes them and docs/api.md explains them.

Requests are checked against these. Answers are written without them, which is several times as
fast; tests hold every answer against its shape.
"""

from __future__ import annotations

from pathlib import Path
from typing import Annotated, Any, Literal

from pydantic import BaseModel, ConfigDict, Field

from drystone.describe.files.job import make_job, parse_job
from drystone.describe.job import TrainingJob
from drystone.errors import InvalidSpec
from drystone.run.lifecycle import JobState

MOST_SEQUENCE = 2**53
JobId = Annotated[str, Field(max_length=64, examples=["1"])]
_PRINTABLE = r"^[^\x00-\x1f\x7f-\x9f]*$"
Name = Annotated[str, Field(pattern=r"^[A-Za-z0-9][A-Za-z0-9._-]{0,39}$")]
TeamName = Annotated[str, Field(pattern=r"^([A-Za-z0-9][A-Za-z0-9._-]{0,39})?$")]
Period = Literal["day", "week", "month", "ever"]
Amount = Annotated[float, Field(ge=0, le=1e12, allow_inf_nan=False)]
Counts = dict[str, int]
Responses = dict[int | str, dict[str, Any]]  # as FastAPI takes them


class Shape(BaseModel):
    """Nothing more and nothing else than is said."""

    model_config = ConfigDict(extra="forbid", strict=True)


class JobBody(Shape):
    """A job to plan or to submit: a file's text, or its keys as a table."""

    model_config = ConfigDict(
        extra="forbid",
        strict=True,
        json_schema_extra={
            "examples": [
                {"job": {"model": "mini-gpt", "train": {"steps": 3}}},
                {"text": "model: mini-gpt\ntrain: {steps: 3, batch: 8}\n"},
            ]
        },
    )

    text: str | None = Field(default=None, max_length=32_768)
    job: dict[str, Any] | None = None
    folder: str = Field(default="/", max_length=4096, pattern=_PRINTABLE)
    owner: str = Field(default="", max_length=80, pattern=_PRINTABLE)
    team: TeamName = ""
    client_key: str = Field(default="", max_length=200, pattern=_PRINTABLE)
    files: str = Field(default="", pattern=r"^([0-9a-f]{32})?$")

    def training_job(self, folder: Path | None = None, owner: str | None = None) -> TrainingJob:
        """The job, checked; with another folder and owner than it says, where they are given."""
        if (self.text is None) == (self.job is None):
            raise InvalidSpec("give either text or job")
        if not self.folder.startswith("/"):
            raise InvalidSpec("folder must be a whole path", where="folder")
        home, name = folder or Path(self.folder), self.owner if owner is None else owner
        if self.text is not None:
            return parse_job(self.text, folder=home, owner=name)
        return make_job(self.job or {}, folder=home, owner=name)


class SessionBody(Shape):
    """A token to log in with."""

    token: str = Field(max_length=200)


class TokenBody(Shape):
    """A token to make."""

    name: Name
    role: Literal["viewer", "submitter", "admin"]
    team: TeamName = ""


class TeamBody(Shape):
    """A team to make."""

    name: Name
    quota: Amount | None = None
    budget_dollars: Amount | None = None
    budget_period: Period = "month"


class TeamChange(Shape):
    """What to change of a team; what is left out stays, null takes a limit away."""

    quota: Amount | None = None
    budget_dollars: Amount | None = None
    budget_period: Period | None = None


class Problem(Shape):
    """What was wrong."""

    kind: str
    message: str
    where: str
    hint: str


class Failure(Shape):
    """Every failure."""

    error: Problem


class Job(Shape):
    """One job."""

    id: str
    name: str
    owner: str
    team: str
    state: JobState
    phase: str
    model: str
    priority: float
    gpus: Counts
    devices: list[tuple[str, int]]
    plan: str
    step: int
    num_steps: int
    progress: float
    loss: float | None
    step_seconds: float | None
    samples_per_second: float | None
    eta_seconds: float | None
    deadline_seconds: float | None
    submit_seconds: float
    first_start_seconds: float | None
    end_seconds: float | None
    run_seconds: float
    dollars: float
    dollars_per_hour: float
    reason: str
    num_starts: int
    num_faults: int
    retry_seconds: float | None


class Launch(Shape):
    """One launch of a job."""

    epoch: int
    plan: str
    devices: list[tuple[str, int]]
    time_seconds: float


class JobDetails(Job):
    """One job in full."""

    num_bad_reports: int  # of the last launch: lines that look like reports and cannot be read
    bad_report: str  # what was wrong with the last of them
    description: dict[str, Any]
    launches: list[Launch]
    curve: list[tuple[int, float | None, float | None]]


class JobPage(Shape):
    """One page of jobs."""

    jobs: list[Job]
    total: int
    next_skip: int | None
    now_seconds: float
    sequence: int
    is_emulated: bool


class Option(Shape):
    """One way to run what is left of a job."""

    gpus: Counts
    samples_per_second: float
    seconds: float
    dollars: float | None
    dollars_per_hour: float | None
    is_free: bool
    is_measured: bool


class Planned(Shape):
    """What submitting would do."""

    job: dict[str, Any]
    steps: int
    options: list[Option]
    chosen: Option
    num_waiting: int


class SubmittedJob(Shape):
    """A job that was taken in."""

    id: str
    is_new: bool


class LogPart(Shape):
    """A stretch of a log."""

    text: str
    offset: int
    is_over: bool
    epoch: int


class DecisionMade(Shape):
    """The last decision about a job."""

    decision: str
    reason: str
    numbers: dict[str, float | None]
    time_seconds: float


class Why(Shape):
    """Why a job waits, or has what it has."""

    id: str
    state: JobState
    sentence: str
    position: int | None
    num_waiting: int
    expected_start_seconds: float | None
    not_before_seconds: float | None
    ahead: list[str]
    options: list[Option]
    prices: dict[str, float | None]
    decision: DecisionMade | None
    faults: Counts
    blocking: list[str]


class Happening(BaseModel):
    """One event; what else it has depends on its kind."""

    model_config = ConfigDict(extra="allow")

    sequence: int
    event: str
    time_seconds: float
    actor: str


class Happenings(Shape):
    """Events, oldest first."""

    events: list[Happening]
    last: int


class Node(Shape):
    """One node."""

    id: str
    gpu: str
    num_gpus: int
    free: int
    is_emulated: bool
    is_drained: bool
    is_lost: bool
    speed: float | None
    memory_bytes: float | None
    jobs: list[str]
    devices: list[str | None]


class GpuType(Shape):
    """One GPU type of the cluster."""

    gpu: str
    total: int
    free: int
    dollars_per_hour: float | None
    value: float
    is_emulated: bool
    is_own: bool  # described by the service's own file, not by the catalogue


class Cluster(Shape):
    """Nodes, types and money."""

    nodes: list[Node]
    gpus: list[GpuType]
    is_emulated: bool
    dollars_per_hour: float
    dollars: float


class Moved(Shape):
    """A node that was drained, and who left it."""

    node: str
    moved: list[str]


class Health(Shape):
    """How the controller is."""

    status: Literal["ok", "troubled"]
    version: str
    is_emulated: bool
    policy: str
    epoch: int
    last_sequence: int
    decision_seconds: float
    last_error: str
    num_jobs_put_aside: int  # that could not be looked after, and are tried again
    now_seconds: float


class Alive(Shape):
    """For probes."""

    status: str
