"""A job's curve goes through all its launches."""

import json

from drystone.run.control.progress import MOST_POINTS, Curves, RunProgress


class Reports:
    """What launches wrote, a few bytes at a time; and how often it was read."""

    def __init__(self, **steps: range) -> None:
        self.texts = {
            int(name[1:]): "".join(line(step, int(name[1:])) for step in some)
            for name, some in steps.items()
        }
        self.num_reads = 0

    def __call__(self, job_id: str, epoch: int, offset: int) -> tuple[str, int]:
        self.num_reads += 1
        rest = self.texts.get(epoch, "")[offset:]
        end = rest.find("\n", 200) + 1 or len(rest)
        return rest[:end], offset + end


def line(step: int, epoch: int) -> str:
    return json.dumps({"event": "step", "step": step, "loss": epoch / 10, "step_seconds": 1}) + "\n"


def test_what_a_later_launch_did_again_counts_as_that_one_did_it():
    curves = Curves(Reports(e1=range(1, 10), e2=range(6, 20), e4=range(16, 30)))

    found = curves.curve("1", [1, 2, 3, 4])
    assert [step for step, _, _ in found] == list(range(1, 30))
    assert [loss for _, loss, _ in found] == [0.1] * 5 + [0.2] * 10 + [0.4] * 14


def test_launches_that_are_over_are_read_once():
    reports = Reports(e1=range(1, 10), e2=range(10, 12))
    curves, latest = Curves(reports), RunProgress()
    latest.read(line(10, 2), 0.0)

    first = curves.curve("1", [1, 2], latest)
    before = reports.num_reads
    assert curves.curve("1", [1, 2], latest) == first
    assert reports.num_reads == before
    assert [step for step, _, _ in first] == list(range(1, 11))


def test_a_long_curve_is_thinned():
    curves = Curves(Reports(e1=range(1, 1500), e2=range(1500, 3000)))

    found = curves.curve("1", [1, 2])
    assert MOST_POINTS / 2 < len(found) <= MOST_POINTS
    assert [step for step, _, _ in found] == sorted({step for step, _, _ in found})
