"""`drystone top`: what each key does, on a real terminal as well."""

import os
import pty
import select
import subprocess
import sys
import time

import pytest

from drystone.cli.top import View, press

JOBS = ["3", "5", "8"]


def pressed(*keys, view=None):
    view = view or View()
    for key in keys:
        view = press(view, key, JOBS)
    return view


@pytest.mark.parametrize(
    ("keys", "selected"),
    [(["down"], "3"), (["down", "down"], "5"), (["up"], "8"), (["down", "up"], "8"), ([], "")],
)
def test_jobs_are_selected_round_and_round(keys, selected):
    assert pressed(*keys).selected == selected


def test_nothing_is_cancelled_without_a_selection_and_a_yes():
    assert "Select a job" in pressed("c").told
    assert pressed("c", "y").action == ""
    asked = pressed("down", "c")
    assert (asked.question, asked.action) == ("3", "")
    assert press(asked, "y", JOBS).action == "cancel"
    for key in ("n", "q", "enter", "down"):
        after = press(asked, key, JOBS)
        assert (after.question, after.action, after.selected) == ("", "", "3")


def test_a_job_that_is_gone_is_no_longer_selected():
    view = press(pressed("down"), "c", ["5", "8"])
    assert view.question == ""


def test_sorting_goes_through_all_orders_and_begins_again():
    orders, view = [], View()
    for _ in range(6):
        orders.append(view.order)
        view = press(view, "s", JOBS)
    assert orders == ["state", "cost", "progress", "GPUs", "name", "state"]
    assert pressed("q").action == "quit"


def test_keys_of_a_terminal_have_names_and_the_terminal_is_left_as_it_was():
    code = (
        "from drystone.cli.keys import Keys\n"
        "import sys, termios\n"
        "before = termios.tcgetattr(0)\n"
        "with Keys() as keys:\n"
        "    print('ready', flush=True)\n"
        "    while (key := keys.read(60)) != 'q':\n"
        "        print('key', key, flush=True)\n"
        "print('same', termios.tcgetattr(0) == before)\n"
    )
    ours, theirs = pty.openpty()
    process = subprocess.Popen(
        [sys.executable, "-c", code], stdin=theirs, stdout=theirs, stderr=theirs
    )
    os.close(theirs)
    told = ""

    def hear(word):
        nonlocal told
        deadline = time.monotonic() + 60
        while word not in told:
            assert time.monotonic() < deadline, told
            if select.select([ours], [], [], 0.2)[0]:
                told += os.read(ours, 1000).decode()

    hear("ready")
    for sent, name in ((b"\x1b[A", "up"), (b"j", "down"), (b"\n", "enter"), (b"s", "s")):
        os.write(ours, sent)
        hear(f"key {name}")
    os.write(ours, b"q")
    hear("same True")
    assert process.wait(60) == 0
    os.close(ours)
