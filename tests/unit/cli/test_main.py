"""The command line as its users meet it: real processes, exit codes, streams and messages."""

import json
import os
import subprocess
import sys
from pathlib import Path

import pytest

from drystone import __version__
from drystone.cli import main as cli
from drystone.cli.output import Column, fit_columns, make_console, printable
from drystone.errors import DrystoneError, NothingFits, UnknownName, UnreadableFile


def drystone(*arguments: str, **variables: str) -> subprocess.CompletedProcess[str]:
    """Run one command line in a process of its own, without a terminal."""
    clean = {key: value for key, value in os.environ.items() if key != cli.DEBUG_VARIABLE}
    return subprocess.run(
        [sys.executable, "-m", "drystone", *arguments],
        capture_output=True,
        text=True,
        timeout=60,
        check=False,
        env=clean | variables,
    )


def fail_with(monkeypatch: pytest.MonkeyPatch, error: BaseException) -> None:
    """Let the verb `gpus` do nothing but raise."""

    def verb() -> None:
        raise error

    monkeypatch.setattr(cli, "load_verb", lambda name: verb)


def test_a_package_that_is_missing_is_no_fault(monkeypatch, capsys):
    fail_with(monkeypatch, ModuleNotFoundError("No module named 'xyz'", name="xyz"))

    assert cli.run(["gpus"]) == 1
    assert capsys.readouterr().err == (
        "error: the package 'xyz' is not installed\n"
        "`drystone doctor` says what is missing, and how to add it\n"
    )


def test_help_lists_every_verb():
    done = drystone("--help")

    assert done.returncode == 0
    assert all(name in done.stdout for name in cli.VERBS)
    assert done.stderr == ""


def test_no_arguments_show_the_help():
    assert drystone().stdout == drystone("-h").stdout


def test_version():
    assert drystone("--version").stdout == f"drystone {__version__}\n"


@pytest.mark.parametrize("name", cli.VERBS)
def test_the_summary_of_a_verb_is_the_first_line_of_its_docstring(name: str):
    assert (cli.load_verb(name).__doc__ or "").splitlines()[0] == cli.VERBS[name]


def test_help_imports_nothing_heavy():
    code = (
        "import sys; from drystone.cli.main import run; run(['--help']); "
        "heavy = {'numpy', 'rich', 'pydantic', 'torch', 'yaml', 'ray', 'fastapi', 'sqlalchemy', "
        "'matplotlib', 'uvicorn'} & set(sys.modules); "
        "sys.exit(str(sorted(heavy)) if heavy else 0)"
    )
    done = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, check=False)

    assert done.returncode == 0, done.stderr


@pytest.mark.parametrize("verb", ["gpus", "models"])
def test_json_is_one_document_on_standard_output(verb: str):
    done = drystone(verb, "--json")
    rows = json.loads(done.stdout)[verb]

    assert done.returncode == 0
    assert done.stderr == ""
    assert len(rows) >= 40
    assert all(row["name"] and row["source"] for row in rows)


def test_gpus_shows_the_cheapest_price_with_its_cloud():
    done = drystone("gpus", "A100-80GB-SXM", COLUMNS="200")
    row = json.loads(drystone("gpus", "A100-80GB-SXM", "--json").stdout)["gpus"][0]
    cheapest = min(row["prices"], key=lambda price: price["on_demand_dollars_per_gpu_hour"])

    assert f"{cheapest['on_demand_dollars_per_gpu_hour']:.2f}" in done.stdout
    assert cheapest["cloud"] in done.stdout
    assert cheapest["date"] in done.stdout


def test_models_counts_parameters_and_shows_experts():
    row = json.loads(drystone("models", "mixtral-8x7b", "--json").stdout)["models"][0]

    assert row["num_params"] == 46_702_792_704
    assert row["num_active_params"] < row["num_params"]
    assert (row["top_k"], row["num_experts"]) == (2, 8)


def test_a_number_in_a_pattern_is_a_whole_number():
    names = [
        one["name"] for one in json.loads(drystone("models", "llama-3", "--json").stdout)["models"]
    ]

    assert "llama-3-8b" in names
    assert "llama-3.1-8b" in names
    assert "llama-30b" not in names


@pytest.mark.parametrize("width", [40, 80, 140])
@pytest.mark.parametrize("verb", ["gpus", "models"])
def test_tables_keep_to_the_width_of_the_terminal(verb: str, width: int):
    lines = drystone(verb, COLUMNS=str(width)).stdout.splitlines()

    assert len(lines) > 40
    assert max(len(line) for line in lines) <= width


@pytest.mark.parametrize("arguments", [("gpus", "A100-90G"), ("gpus", "A100-90G", "--json")])
def test_an_unknown_gpu_ends_with_two_and_a_hint_on_standard_error(arguments: tuple[str, ...]):
    done = drystone(*arguments)

    assert done.returncode == 2
    assert done.stdout == ""
    assert "unknown GPU 'A100-90G'" in done.stderr
    assert "Did you mean 'A100-80G'" in done.stderr
    assert "Traceback" not in done.stderr


@pytest.mark.parametrize(
    ("line", "message"),
    [
        ("plan", "error: no model is named\ndrystone plan MODEL, or --config FILE\n"),
        ("plan gpt2 --gpus", "error: option '--gpus' requires an argument\n"),
        ("pln gpt2", "error: no such command 'pln'\nDid you mean 'plan'?\n"),
        ("trace x", "error: no such command 'x'\nKnown: convert, generate, show\n"),
        ("check x", "error: invalid value for 'measure': 'x' is not one of 'memory', 'speed'\n"),
        ("demo --only 99", "error: invalid value for '--only'"),
        ("trace show x.csv", "error: x.csv: no trace can be read: No such file or directory\n"),
    ],
)
def test_a_command_line_that_cannot_be_read_is_a_wrong_request_too(line: str, message: str, capsys):
    assert cli.run(line.split()) == 2
    told = capsys.readouterr()
    assert told.out == ""
    assert told.err.startswith(message)


def test_an_unknown_model_ends_with_two_and_a_hint():
    done = drystone("models", "lama-3-8b-x")

    assert done.returncode == 2
    assert "llama-3-8b" in done.stderr


@pytest.mark.parametrize(
    ("arguments", "message"),
    [
        (("gpuz",), "Did you mean 'gpus'"),
        (("gpus", "--nope"), "--nope"),
        (("gpus", "A100", "H100"), "unexpected extra argument"),
        (("--nope",), "--nope"),
    ],
)
def test_usage_errors_end_with_two(arguments: tuple[str, ...], message: str):
    done = drystone(*arguments)

    assert done.returncode == 2
    assert done.stdout == ""
    assert message in done.stderr
    assert "Traceback" not in done.stderr


@pytest.mark.parametrize(
    ("error", "code"),
    [
        (DrystoneError("it broke"), 1),
        (UnreadableFile("not JSON", where="config.json", hint="Download it again"), 2),
        (NothingFits("too large", hint="Try more GPUs"), 3),
    ],
)
def test_each_error_has_its_exit_code_and_one_message(monkeypatch, capsys, error, code: int):
    fail_with(monkeypatch, error)

    assert cli.run(["gpus"]) == code
    captured = capsys.readouterr()
    assert captured.out == ""
    assert captured.err.startswith("error: ")
    for part in (error.message, error.where, error.hint):
        assert part in captured.err


def test_a_fault_of_ours_is_short_unless_debugging(monkeypatch, capsys):
    fail_with(monkeypatch, ZeroDivisionError("by zero"))

    assert cli.run(["gpus"]) == 1
    assert "--debug" in (short := capsys.readouterr().err)
    assert "Traceback" not in short

    assert cli.run(["gpus"], debug=True) == 1
    assert "Traceback" in capsys.readouterr().err


def test_debug_may_stand_anywhere_or_in_the_environment():
    assert "Traceback" in drystone("gpus", "A100-90G", "--debug").stderr
    assert "Traceback" in drystone("--debug", "gpus", "A100-90G").stderr
    assert "Traceback" in drystone("gpus", "A100-90G", DRYSTONE_DEBUG="1").stderr
    assert "Traceback" not in drystone("gpus", "A100-90G", DRYSTONE_DEBUG="0").stderr


def test_an_interrupt_is_quiet(monkeypatch, capsys):
    fail_with(monkeypatch, KeyboardInterrupt())

    assert cli.run(["gpus"]) == 130
    assert capsys.readouterr().err == ""


def test_a_reader_that_leaves_is_no_reason_to_complain(tmp_path: Path):
    errors = tmp_path / "errors"
    with errors.open("w") as stderr:
        writer = subprocess.Popen(
            [sys.executable, "-m", "drystone", "gpus", "--json"],
            stdout=subprocess.PIPE,
            stderr=stderr,
        )
        assert writer.stdout is not None
        writer.stdout.close()
        writer.wait(timeout=60)

    assert errors.read_text() == ""


@pytest.mark.skipif(not Path("/dev/full").exists(), reason="needs a device that is always full")
@pytest.mark.parametrize("arguments", [("gpus", "T4"), ("models", "--json")])
def test_a_full_disk_is_one_message(arguments: tuple[str, ...]):
    with Path("/dev/full").open("w") as full:
        done = subprocess.run(
            [sys.executable, "-m", "drystone", *arguments],
            stdout=full, stderr=subprocess.PIPE, text=True, timeout=60, check=False,
        )  # fmt: skip

    assert done.returncode == 1
    assert done.stderr.startswith("error: ")
    assert done.stderr.count("\n") == 1


def test_markup_and_control_characters_in_a_name_are_shown_and_not_obeyed():
    done = drystone("gpus", "[bold]\x1b[31mred")

    assert done.returncode == 2
    assert "\x1b" not in done.stderr
    assert "[bold]" in done.stderr
    assert printable("a\x1b[31m\n") == "a\\x1b[31m\n"


def test_a_text_in_brackets_is_no_markup(capsys):
    make_console(stderr=True).print("pip install 'drystone[runtime]'")

    assert capsys.readouterr().err == "pip install 'drystone[runtime]'\n"


def test_an_unknown_name_is_told_all_there_are_if_they_are_few():
    assert UnknownName("job", "1", []).hint == "There is no job yet"
    assert UnknownName("key", "?", [f"k{one}" for one in range(13)]).hint.endswith("k9")
    assert UnknownName("key", "?", [f"k{one}" for one in range(21)]).hint.endswith(", ...")


def test_columns_of_the_largest_rank_go_first():
    columns = [Column(header="name"), Column(header="much", rank=2), Column(header="key", rank=1)]
    rows = [("aaaa", "bbbb", "cccc")]

    assert fit_columns(columns, rows, width=18) == [0, 1, 2]
    assert fit_columns(columns, rows, width=17) == [0, 2]
    assert fit_columns(columns, rows, width=1) == [0]


@pytest.mark.parametrize(
    ("arguments", "message"),
    [
        (("--engine", "rai"), "unknown engine 'rai'"),
        (("--engine", "slurm", "--address", "h:1"), "--address is for --engine ray"),
        (("--engine", "ray", "--partition", "gpu"), "are for --engine slurm"),
    ],
)
def test_serve_refuses_a_wrong_engine_before_it_looks_at_anything(arguments, message: str):
    done = drystone("serve", *arguments)

    assert done.returncode == 2
    assert done.stdout == ""
    assert message in done.stderr.splitlines()[0]
