import math
import unicodedata

import pytest

from drystone.run.control.failures import FaultKind, is_hopeless, judge, last_lines, wait_seconds
from drystone.run.control.progress import MOST_POINTS, RunProgress
from drystone.run.engines.agent.launches import LOST_EXIT

PEER = "RuntimeError: [gloo/transport/tcp/pair.cc:525] Connection closed by peer [127.0.0.1]:1"


@pytest.mark.parametrize(
    ("exits", "logs", "kind", "blamed"),
    [
        ({0: 1}, {0: "Traceback\nValueError: no"}, FaultKind.USER_ERROR, "rank 0"),
        ({0: 1, 1: 1}, {0: PEER, 1: "torch.OutOfMemoryError: CUDA out of memory"},
         FaultKind.OUT_OF_MEMORY, "rank 1"),
        ({0: 1, 1: -9}, {0: PEER, 1: ""}, FaultKind.CRASH, "rank 1: died of SIGKILL"),
        ({0: 1, 1: 1}, {0: PEER, 1: PEER}, FaultKind.NETWORK, "rank 0"),
        ({0: 1, 1: 1}, {0: PEER, 1: "TypeError: x"}, FaultKind.USER_ERROR, "rank 1"),
        ({0: 1}, {0: "OSError: [Errno 28] No space left on device"}, FaultKind.DISK, "rank 0"),
        ({0: 75}, {0: "the lease ran out 3.0 s ago"}, FaultKind.PREEMPTED, "rank 0"),
        ({0: 0, 1: LOST_EXIT}, {}, FaultKind.NODE_LOST, "node"),
        ({0: 0}, {}, FaultKind.PREEMPTED, "left before"),
        ({0: -11}, {0: ""}, FaultKind.CRASH, "SIGSEGV"),
    ],
)  # fmt: skip
def test_faults_are_told_apart(exits, logs, kind, blamed):
    fault = judge(exits, logs)

    assert fault.kind is kind
    assert blamed in fault.reason


def test_the_end_of_the_log_is_in_the_reason():
    log = "\n".join(f"line {number}" for number in range(50)) + "\n\nValueError: no\n"

    assert judge({0: 1}, {0: log}).reason.endswith("line 49\nValueError: no")
    assert len(last_lines(log).splitlines()) == 12
    assert len(last_lines("x" * 10_000)) == 300


def test_faults_are_treated_apart():
    assert is_hopeless(FaultKind.USER_ERROR, 1)
    assert not is_hopeless(FaultKind.CRASH, 1)
    assert is_hopeless(FaultKind.CRASH, 5)
    assert not is_hopeless(FaultKind.NODE_LOST, 1000)
    assert wait_seconds(FaultKind.OUT_OF_MEMORY, 3) == 0
    assert [wait_seconds(FaultKind.PREEMPTED, number) for number in (1, 2, 3)] == [0, 2, 4]
    assert [wait_seconds(FaultKind.CRASH, one) for one in (1, 2, 3, 30)] == [2, 4, 8, 300]


def test_reports_become_progress():
    progress = RunProgress()
    progress.read('nonsense\n{"event": "started", "step": 4}\n{"event": 3}\n[1]\n{bro', 10.0)
    assert (progress.step, progress.first_step) == (4, 4)
    for step, seconds in ((5, 9.0), (6, 9.0), (7, 1.0), (8, 1.2), (9, 1.1)):
        progress.read(
            f'{{"event": "step", "step": {step}, "loss": NaN, "step_seconds": {seconds}, '
            f'"peak_memory_bytes": [5, {step}]}}\n', 11.0,
        )  # fmt: skip
    progress.read('{"event": "checkpoint", "step": 8}\n{"event": "left", "step": 9}', 12.0)

    assert progress.step_seconds == 1.1  # without the first two
    assert (progress.checkpoint_step, progress.peak_memory_bytes) == (8, 9)
    assert progress.has_left
    assert not progress.is_finished
    assert progress.heard_seconds == 12.0


def test_a_long_curve_is_thinned():
    progress = RunProgress()
    for step in range(1, 3 * MOST_POINTS):
        progress.read(f'{{"event": "step", "step": {step}, "loss": 1, "step_seconds": 1}}', 0.0)

    assert len(progress.curve) <= MOST_POINTS
    assert progress.curve[0][0] == 1
    assert progress.curve[-1][0] == 3 * MOST_POINTS - 1


@pytest.mark.parametrize("step", ["true", "-1", '"7"', "1.5", "null"])
def test_a_step_that_is_no_number_is_passed_over(step):
    progress = RunProgress()
    progress.read(f'{{"event": "step", "step": {step}}}', 0.0)

    assert progress.step == -1


@pytest.mark.parametrize(
    "line",
    [
        '{"event": "step", "step": 1, "x": ' + "[" * 20_000 + "]" * 20_000 + "}",
        '{"event": "step", "step": 1, "x": "' + "x" * 70_000 + '"}',
        '{"event": "step", "step": 1' + "0" * 20 + "}",
        '{"event": "step", "step": 1' + "0" * 5000 + "}",
        '{"event": "step", "st',
    ],
)
def test_a_report_that_cannot_be_read_is_counted(line):
    progress = RunProgress()
    progress.read(line + '\n{"event": "step", "step": 2}\n', 0.0)

    assert progress.step == 2
    assert progress.num_bad_reports == 1
    assert progress.bad_report.startswith("a report ")


@pytest.mark.parametrize("number", ["5e-324", "1e-9", "1e308", "Infinity", "NaN", "1" + "0" * 400])
def test_numbers_that_nobody_can_have_measured_are_left_out(number):
    progress = RunProgress()
    for step in range(1, 9):
        progress.read(
            f'{{"event": "step", "step": {step}, "step_seconds": {number}, '
            f'"peak_memory_bytes": [{"9" * 40}]}}', 0.0,
        )  # fmt: skip

    assert progress.step == 8
    assert math.isnan(progress.step_seconds)
    assert progress.peak_memory_bytes == 0
    assert progress.num_bad_reports == 0


def test_a_reason_is_printable_and_not_endless():
    log = (
        "".join(chr(number) for number in range(256)) + "\ud800\r50%\r\n\x1b]0;title\x07\x1b[1mend"
    )
    reason = judge({0: 1}, {0: log}, note="n" * 10_000).reason

    kept = {char for char in last_lines(log) if unicodedata.category(char) in ("Cc", "Cs")}
    assert kept <= {"\n", "\t"}
    assert last_lines(log).endswith("50%\nend")
    assert len(reason) == 5000
    reason.encode()
