"""Patience with one job: how long its first report, its next report and its leaving may take."""

from __future__ import annotations

from dataclasses import dataclass


@dataclass(frozen=True, slots=True, kw_only=True)
class JobPatience:
    """How long the controller waits for a job, as its owner says; None: as the service waits."""

    start_seconds: float | None = None  # until its first report
    silence_seconds: float | None = None  # between reports
    grace_seconds: float | None = None  # to save and leave, once asked to
