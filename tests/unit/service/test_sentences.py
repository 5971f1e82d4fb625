"""Every kind of event in words."""

import pytest

from drystone.run.control.notes import NOTES
from drystone.run.events import KINDS
from drystone.service.sentences import PHRASES, job_of, phrase_of


def test_every_kind_of_event_has_a_phrase_and_no_other():
    assert set(PHRASES) == set(KINDS) | set(NOTES)


@pytest.mark.parametrize("kind", sorted(set(KINDS) | set(NOTES)))
def test_an_event_of_another_version_is_shown_by_name_at_worst(kind: str):
    assert phrase_of({"event": kind})


def test_a_reason_follows_and_only_its_first_line():
    event = {"event": "Failed", "job_id": "7", "reason": "out of memory\nTraceback ..."}

    assert phrase_of(event) == "failed: out of memory"
    assert job_of(event) == "7"


def test_what_was_learned_is_compared_with_the_estimate():
    event = {
        "event": "Learned", "job_id": "7", "gpus": [["T4-16GB", 2]],
        "measured_samples_per_second": 12.0, "estimated_samples_per_second": 10.0,
    }  # fmt: skip

    assert phrase_of(event) == "ran at 12 samples/s on 2 T4-16GB; the estimate was 10"


def test_plans_that_were_tried_are_told_with_their_times():
    event = {
        "event": "Learned", "job_id": "7", "gpus": [["T4-16GB", 2]], "kept": "cell: dp1 tp2",
        "trials": [["cell: dp2 tp1", 1.0, 1.25], ["cell: dp1 tp2", 1.05, 1.1]],
    }  # fmt: skip

    assert phrase_of(event) == (
        "tried 2 plans and keeps cell: dp1 tp2: "
        "cell: dp2 tp1 1.25 s (estimate 1); cell: dp1 tp2 1.1 s (estimate 1.05)"
    )


def test_an_unknown_kind_is_its_name():
    assert phrase_of({"event": "Rewound"}) == "Rewound"


def test_the_job_of_a_submission_is_found_inside_it():
    assert job_of({"event": "Submitted", "job": {"id": "3"}}) == "3"
    assert job_of({"event": "NodeLost", "node": 1}) == ""
