"""`--help` of every command: a description, examples, and every example a line that parses."""

import os
import re
import shlex
import shutil
import subprocess
import sys
from collections.abc import Iterator
from pathlib import Path

import pytest
import typer

from drystone.cli import main as cli
from drystone.cli.examples import EXAMPLES, epilog
from drystone.cli.help import SECTIONS

ROOT = Path(__file__).resolve().parents[3]
COLUMNS = 80
# What only makes sense beside a running service, takes minutes, or changes the home folder.
NEEDS_MORE = {
    "run", "serve", "submit", "jobs", "show", "logs", "why", "cancel", "pause", "resume", "cluster",
    "wait", "events", "verify", "mcp",
    "budget", "drain", "waste", "top", "token", "login", "team", "log", "demo", "profile",
    "--install-completion", "check", "frontier",  # seconds each, and run by the tests of the docs
}  # fmt: skip


def commands() -> Iterator[tuple[str, object]]:
    """Every command and sub-command with its name, as the app has them."""
    for verb in cli.VERBS:
        found = typer.main.get_command(cli._build_app([verb])).commands[verb]
        yield verb, found
        for name, inner in getattr(found, "commands", {}).items():
            yield f"{verb} {name}", inner


COMMANDS = dict(commands())


def example_lines() -> list[str]:
    return [command for examples in EXAMPLES.values() for _, command in examples]


def show(*arguments: str, **variables: str) -> str:
    done = subprocess.run(
        [sys.executable, "-m", "drystone", *arguments],
        capture_output=True, text=True, timeout=60, check=False,
        env={**os.environ, "COLUMNS": str(COLUMNS)} | variables,
    )  # fmt: skip
    assert done.returncode == 0, done.stderr
    return done.stdout


def test_every_command_and_sub_command_has_examples_and_none_is_left_over():
    assert set(EXAMPLES) - {""} == set(COMMANDS)


@pytest.mark.parametrize("name", COMMANDS)
def test_the_help_of_a_command_describes_it_and_ends_with_its_examples(name: str):
    command = COMMANDS[name]
    described = (command.help or "").partition("With --json")[0]

    assert len(" ".join(described.split())) >= 40
    assert command.epilog == epilog(name)
    for _, line in EXAMPLES[name]:
        assert line.split()[: len(name.split())] == name.split() or name in ("trace", "token")


@pytest.mark.parametrize("line", example_lines())
def test_an_example_parses(line: str):
    words = shlex.split(line)
    group = typer.main.get_command(cli._build_app(words))
    if words[0].startswith("-"):
        group.make_context("drystone", words, resilient_parsing=True)
        return
    while (command := getattr(group, "commands", {}).get(words[0])) is not None:
        group, words = command, words[1:]
        if not words:
            break

    context = group.make_context("drystone", list(words))
    assert context.args == []


def test_a_wrong_option_would_be_noticed():
    command = COMMANDS["plan"]

    with pytest.raises(Exception, match="No such option"):
        command.make_context("drystone", ["gpt2-xl", "--gpsu", "8xA100"])


@pytest.mark.parametrize("name", ["", "plan", "trace", "trace generate", "simulate"])
def test_help_fits_into_80_columns_and_shows_the_examples_line_by_line(name: str):
    text = show(*name.split(), "--help")
    shown = text[text.index("Examples:") :]

    assert max(len(line) for line in text.splitlines()) <= COLUMNS
    assert "\x1b" not in text
    joined = " ".join(shown.replace("\\\n", " ").split())
    for purpose, line in EXAMPLES[name]:
        assert purpose in shown
        assert f"drystone {line}" in joined


OLD_NAMES = {
    ("plan", "--most"): "--limit",
    ("jobs", "--most"): "--limit",
    ("budget", "--most"): "--limit",
    ("simulate", "--most-jobs"): "--max-jobs",
    ("frontier", "--most-jobs"): "--max-jobs",
    ("trace convert", "--most-jobs"): "--max-jobs",
    ("simulate", "--restart-most-seconds"): "--restart-max-seconds",
    ("serve", "--weather"): "--simulated-cloud",
    ("plan", "--seq-len"): "--sequence",
    ("plan", "--global-batch"): "--batch",
    ("estimate", "--seq-len"): "--sequence",
    ("estimate", "--global-batch"): "--batch",
}


@pytest.mark.parametrize(("command", "old"), OLD_NAMES)
def test_the_old_name_of_an_option_still_works(command: str, old: str):
    names = [option.opts for option in COMMANDS[command].params]

    assert [OLD_NAMES[command, old], old] in names


def test_no_summary_is_cut_in_the_list_of_verbs():
    text = show("--help")

    assert all(summary in text for summary in cli.VERBS.values())


def test_every_verb_stands_under_a_subject():
    text = show("--help")

    assert "More:" not in text
    assert all(f"{title}:" in text for title in SECTIONS)


@pytest.mark.parametrize("name", ["submit", "plan", "serve"])
def test_options_are_shown_in_plain_words(name: str):
    text = show(name, "--help")

    assert not re.search(r"<\w", text.partition("Examples:")[0].partition("Options:")[2])
    assert "default: 0" not in text


@pytest.mark.slow
def test_the_examples_that_need_no_service_run(tmp_path: Path):
    for name in ("jobs.csv", "cluster.yaml", "market.yaml", "sacct.txt"):
        shutil.copy(ROOT / "examples" / "simulate" / name, tmp_path)
    lines = [line for line in dict.fromkeys(example_lines()) if line.split()[0] not in NEEDS_MORE]
    assert len(lines) >= 15
    plans = {"a100.json": "8xA100-80G", "l40s.json": "8xL40S"}
    lines = [f"plan gpt2-xl --gpus {gpus} --save {name}" for name, gpus in plans.items()] + lines
    script = (
        "import sys\nfrom drystone.cli.main import run\n"
        "codes = {line: run(line.split()) for line in sys.stdin.read().splitlines()}\n"
        "sys.exit(repr({line: code for line, code in codes.items() if code}) if any(codes.values())"
        " else 0)"
    )
    done = subprocess.run(
        [sys.executable, "-c", script], input="\n".join(lines), cwd=tmp_path,
        stdout=subprocess.DEVNULL, stderr=subprocess.PIPE, text=True, timeout=200, check=False,
    )  # fmt: skip

    assert done.returncode == 0, done.stderr
