import pytest

from drystone.describe.cluster import NodeSpec
from drystone.describe.job import JobSpec
from drystone.errors import RequestError
from drystone.run import events
from drystone.run.events import (
    KINDS,
    Event,
    Interrupted,
    NodeAdded,
    NodeRemoved,
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
    NodeAdded(time_seconds=11.0, node=4, spec=NodeSpec(id="n", gpu="T4", num_gpus=2)),
    NodeRemoved(time_seconds=12.0, node=4, reason="why"),
]


@pytest.mark.parametrize("event", EVENTS, ids=lambda one: type(one).__name__)
def test_an_event_reads_back_as_it_was(event):
    assert parse_event(render_event(event)) == event


def test_a_log_reads_back_line_by_line():
    assert list(parse_events([render_event(one) for one in EVENTS] + [""])) == EVENTS


def test_every_kind_is_known():
    classes = [one for one in vars(events).values() if isinstance(one, type)]

    assert set(KINDS.values()) == {one for one in classes if issubclass(one, Event)} - {Event}


@pytest.mark.parametrize("line", ["", "[]", "{}", '{"event": "Startled"}', "nonsense"])
def test_what_is_no_event_is_refused(line: str):
    with pytest.raises(RequestError):
        parse_event(line)
