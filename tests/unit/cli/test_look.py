"""Tables, numbers and colours look the same everywhere: wide, in 80 columns, piped, NO_COLOR."""

import os
import pty
import subprocess
import sys

import pytest

from drystone.cli.columns import counted, money
from drystone.cli.output import Column, print_table

ESCAPE = "\x1b"
MIXED = ("plan", "llama-3-8b", "--gpus", "8xA100-80G,8xV100-32G")


def in_a_terminal(*arguments: str, **variables: str) -> str:
    """What a person sees, with the codes for colours."""
    ours, theirs = pty.openpty()
    environment = {"TERM": "xterm-256color", "COLUMNS": "80"} | variables
    kept = {key: value for key, value in os.environ.items() if key != "NO_COLOR"}
    process = subprocess.Popen(
        [sys.executable, "-m", "drystone", *arguments], stdin=subprocess.DEVNULL, stdout=theirs,
        stderr=subprocess.DEVNULL, env=kept | environment,
    )  # fmt: skip
    os.close(theirs)
    text = b""
    try:
        while part := os.read(ours, 65536):
            text += part
    except OSError:  # Linux says so when the other side is closed
        pass
    finally:
        os.close(ours)
        process.wait(timeout=60)
    return text.decode()


def piped(*arguments: str, **variables: str) -> str:
    kept = {key: value for key, value in os.environ.items() if key not in ("COLUMNS", "NO_COLOR")}
    done = subprocess.run(
        [sys.executable, "-m", "drystone", *arguments], capture_output=True, text=True,
        timeout=60, check=True, env=kept | variables,
    )  # fmt: skip
    return done.stdout


@pytest.mark.parametrize(
    "arguments", [("gpus", "T4"), ("models", "llama-3"), ("doctor",), ("plan", "gpt2-xl")]
)
def test_a_terminal_has_colours_and_no_color_and_pipes_have_none(arguments: tuple[str, ...]):
    assert ESCAPE in in_a_terminal(*arguments)
    assert ESCAPE not in in_a_terminal(*arguments, NO_COLOR="1")
    assert ESCAPE not in piped(*arguments)


@pytest.mark.parametrize("width", [80, 100, 160])
def test_plans_keep_to_the_terminal_and_words_are_not_cut_to_pieces(width: int):
    text = piped(*MIXED, COLUMNS=str(width))
    words = text.split()

    assert max(len(line) for line in text.splitlines()) <= width
    for whole in ("groups,", "fp16-mixed,", "tokens/s", "A100-80GB-SXM:", "sequences"):
        assert whole in words


def test_what_has_no_room_beside_a_plan_stands_below_it():
    wide, narrow = (piped(*MIXED, COLUMNS=str(width)) for width in (160, 80))

    assert "how" in wide.splitlines()[3].split()
    assert "how" not in narrow.splitlines()[3].split()
    told = [line.strip() for line in narrow.splitlines()]
    assert "1  groups, fp16-mixed, recompute none" in told


def test_one_is_not_several():
    assert [counted(number, "job") for number in (0, 1, 1200)] == ["0 jobs", "1 job", "1,200 jobs"]
    assert piped("gpus", "T4-16GB").startswith("1 GPU type ")


def test_money_is_never_rounded_to_nothing():
    assert [money(one) for one in (0.0, 0.00001, 0.00031, 0.31, 1234.5)] == [
        "$0.00", "<$0.0001", "$0.0003", "$0.31", "$1,234.50",
    ]  # fmt: skip


def test_an_empty_table_is_its_heading(capsys: pytest.CaptureFixture[str]):
    print_table("0 tokens", [Column(header="id"), Column(header="name")], [])

    assert capsys.readouterr().out == "0 tokens\n"


@pytest.mark.parametrize("arguments", [("check", "memory"), ("frontier", "--trace", "none.csv",
                                       "--market", "none.yaml")])  # fmt: skip
def test_a_picture_that_cannot_be_drawn_is_refused_before_the_work(arguments: tuple[str, ...]):
    done = subprocess.run(
        [sys.executable, "-m", "drystone", *arguments, "--plot", "picture.bmp"],
        capture_output=True, text=True, timeout=60, check=False,
    )  # fmt: skip

    assert done.returncode == 2
    assert done.stdout == ""
    assert "cannot draw into picture.bmp" in done.stderr
