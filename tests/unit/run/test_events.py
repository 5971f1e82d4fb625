import pytest

from drystone.describe.job import JobSpec
from drystone.errors import RequestError
from drystone.run.events import (
    KINDS,
    Interrupted,
    NodeSlowed,
    PhaseChanged,
    Started,
    Submitted,
    parse_event,
    parse_events,
    render_event,
)

JOB = JobSpec(
    id="a", submit_seconds=1, model="m", total_samples=5, allowed_gpus=frozenset({"B", "A"})
)
EVENTS = [
    Submitted(time_seconds=0.1, job=JOB),
    Started(
        time_seconds=1 / 3,
        job_id="a",
        option=2,
        placement=((0, 1), (4, 2)),
        samples_per_second=0.1,
        productive_seconds=7.0,
        reason="why",
    ),
    Interrupted(time_seconds=9.0, job_id="a", lost_samples=0.5),
    PhaseChanged(time_seconds=9.5, job_id="a", samples_per_second=0.3, phase=2, done_samples=1 / 7),
    NodeSlowed(time_seconds=10.0, node=3, speed_share=0.5),
]


@pytest.mark.parametrize("event", EVENTS, ids=lambda one: type(one).__name__)
def test_an_event_reads_back_as_it_was(event):
    assert parse_event(render_event(event)) == event


def test_a_log_reads_back_line_by_line():
    assert list(parse_events([render_event(one) for one in EVENTS] + [""])) == EVENTS


def test_every_kind_is_known():
    assert len(KINDS) == 25


@pytest.mark.parametrize("line", ["", "[]", "{}", '{"event": "Startled"}', "nonsense"])
def test_what_is_no_event_is_refused(line: str):
    with pytest.raises(RequestError):
        parse_event(line)
