"""Bodies of requests, and the answer to every failure. Other answers stand beside their routes."""

from __future__ import annotations

import math
from pathlib import Path
from typing import Annotated, Any, Literal

from pydantic import BaseModel, ConfigDict, Field

from drystone.describe.files.job import make_job, parse_job
from drystone.describe.job import TrainingJob
from drystone.errors import InvalidSpec

MAX_SEQUENCE = 2**53
JobId = Annotated[str, Field(max_length=64, examples=["1"])]
_PRINTABLE = r"^[^\x00-\x1f\x7f-\x9f]*$"
Name = Annotated[str, Field(pattern=r"^[A-Za-z0-9][A-Za-z0-9._-]{0,39}$")]
TeamName = Annotated[str, Field(pattern=r"^([A-Za-z0-9][A-Za-z0-9._-]{0,39})?$")]
Period = Literal["day", "week", "month", "ever"]
Amount = Annotated[float, Field(ge=0, le=1e12, allow_inf_nan=False)]
Counts = dict[str, int]
Responses = dict[int | str, dict[str, Any]]  # as FastAPI takes them


def finite_or_none(value: float) -> float | None:
    """A number for JSON, which has neither infinity nor NaN."""
    return value if math.isfinite(value) else None


class Shape(BaseModel):
    """A body or an answer: unknown keys and values of another type are refused."""

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
