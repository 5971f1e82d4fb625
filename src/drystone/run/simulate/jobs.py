"""Jobs in virtual time: starts, phases and ends, at their true speeds."""

from __future__ import annotations

import math
from collections.abc import Sequence

from drystone.describe.job import JobSpec
from drystone.run.events import (
    Interrupted,
    PhaseChanged,
    Refused,
    SpeedChanged,
    Started,
    StartFailed,
    Stopped,
    Submitted,
)
from drystone.run.option_table import RunFacts
from drystone.run.simulate.clock import VirtualTime
from drystone.run.simulate.faults import Dice
from drystone.run.state import JobRecord
from drystone.schedule.snapshot import Placement, StartupCost


class JobRuns:
    """The jobs of one simulated run."""

    def __init__(
        self,
        time: VirtualTime,
        dice: Dice,
        *,
        num_jobs: int,
        gpu_types: tuple[str, ...],
        startup: StartupCost,
    ) -> None:
        self._time, self._dice, self._startup = time, dice, startup
        self._state = time.state
        self._gpu_types, self._book = gpu_types, time.maker.book
        self._first_runs = self._book.first_runs
        self._errs = dice.spec.speed_error_share > 0
        self._can_fail = dice.spec.failed_start_share > 0
        self._takes_time = startup.most_seconds > 0
        self.num_jobs = num_jobs  # that have come or will
        self._speed_factors: dict[str, dict[str, float]] = {}  # by job and GPU type

    @property
    def num_to_come(self) -> int:
        """Jobs that are not here yet."""
        return self.num_jobs - len(self._state.jobs)

    @property
    def num_unsettled(self) -> int:
        """Jobs that are to come, wait or run."""
        return self.num_to_come + len(self._state.active)

    def expect(self, jobs: Sequence[JobSpec]) -> None:
        """Let every job come in at its time."""
        self._time.expect(jobs, self.submit)

    def submit(self, time_seconds: float, job: JobSpec) -> None:
        """A job comes in; how far its options are off is drawn."""
        if self._errs:
            factors = self._dice.speed_factors(len(self._gpu_types)).tolist()
            self._speed_factors[job.id] = dict(zip(self._gpu_types, factors, strict=True))
        self._state.submit(Submitted(time_seconds, job))

    def launch(self, job_id: str, option: int, placement: Placement, reason: str) -> None:
        """Start a waiting job."""
        state = self._state
        now, job = state.now_seconds, state.jobs[job_id]
        facts = self._first_runs.get(job_id)
        if facts is None or job.phase:
            facts = self._book.run_facts(job.spec, job.phase)
        speed = facts.samples_per_second[option]
        if self._errs or state.speed_share:
            speed = self._true_speed(job, facts, option, placement)
        spec = job.spec
        delay = spec.startup_seconds
        if delay < 0.0:
            delay = 0.0
            if self._takes_time:
                delay = self._startup.seconds_on(sum([count for _, count in placement]))
        state.start(Started(now, job_id, option, placement, speed, now + delay, reason))
        if self._can_fail and self._dice.start_fails():
            self._time.later_in_run(now + delay, self._fail, job)
        elif facts.end_samples < spec.total_samples:
            self._plan_end(job, facts)
        else:
            self._time.finish_when_done(job)

    def stop(self, job_id: str, reason: str) -> None:
        """Take a running job's GPUs; its progress is kept."""
        now = self._time.now_seconds
        self._time.record(Stopped(time_seconds=now, job_id=job_id, reason=reason))

    def refuse(self, job_id: str, reason: str) -> None:
        """Turn a waiting job away."""
        now = self._time.now_seconds
        self._time.record(Refused(time_seconds=now, job_id=job_id, reason=reason))

    def interrupt_on(self, node: int, time_seconds: float, reason: str) -> None:
        """A node is about to go: its jobs lose their GPUs, and the work since a checkpoint."""
        for record in self._jobs_on(node):
            self._time.record(
                Interrupted(
                    time_seconds=time_seconds,
                    job_id=record.spec.id,
                    lost_samples=self._samples_since_checkpoint(record, time_seconds),
                    reason=reason,
                )
            )

    def change_speed_on(self, node: int, time_seconds: float) -> None:
        """A node became slower or quicker, and so do its jobs."""
        for record in self._jobs_on(node):
            facts = self._book.run_facts(record.spec, record.phase)
            speed = self._true_speed(record, facts, record.option, record.placement)
            self._time.record(
                SpeedChanged(
                    time_seconds=time_seconds, job_id=record.spec.id, samples_per_second=speed
                )
            )
            self._plan_end(record, facts)

    def _plan_end(self, record: JobRecord, facts: RunFacts) -> None:
        """The next thing that happens to a running job by itself, by the facts of its phase."""
        if facts.end_samples < record.spec.total_samples:
            self._time.when_done(facts.end_samples, self._enter_next_phase, record)
        else:
            self._time.finish_when_done(record)

    def _fail(self, time_seconds: float, record: JobRecord) -> None:
        self._time.record(
            StartFailed(time_seconds=time_seconds, job_id=record.spec.id, reason="drawn fault")
        )

    def _enter_next_phase(self, time_seconds: float, record: JobRecord) -> None:
        spec, phase = record.spec, record.phase + 1
        facts = self._book.run_facts(spec, phase)
        self._time.record(
            PhaseChanged(
                time_seconds=time_seconds,
                job_id=spec.id,
                samples_per_second=self._true_speed(record, facts, record.option, record.placement),
                phase=phase,
                done_samples=self._book.run_facts(spec, record.phase).end_samples,
            )
        )
        self._plan_end(record, facts)

    def _samples_since_checkpoint(self, record: JobRecord, now_seconds: float) -> float:
        """Work that is lost now. A change of speed, as at a phase's end, counts as a checkpoint."""
        ran = max(0.0, now_seconds - record.counted_seconds)
        return record.samples_per_second * math.fmod(ran, self._dice.spec.checkpoint_seconds)

    def _jobs_on(self, node: int) -> list[JobRecord]:
        return [
            record
            for record in self._state.active.values()
            if any(one == node for one, _ in record.placement)
        ]

    def _true_speed(
        self, record: JobRecord, facts: RunFacts, option: int, placement: Placement
    ) -> float:
        """What the option says, times how wrong it is, times how slow the nodes are."""
        state, speed = self._state, facts.samples_per_second[option]
        shares, nodes = state.speed_share, state.nodes
        factors = self._speed_factors.get(record.spec.id)
        slowest = min(
            (factors[nodes[node].gpu] if factors else 1.0) * shares.get(node, 1.0)
            for node, _ in placement
        )
        return speed * slowest
