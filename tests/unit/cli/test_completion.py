"""Shells complete verbs, options and names, as Typer has it: real processes."""

import os
import shutil
import subprocess
import sys
from pathlib import Path

import pytest

from drystone.cli.main import VERBS

SHELLS = ("bash", "zsh", "fish")


def complete(shell: str, line: str, **variables: str) -> subprocess.CompletedProcess[str]:
    """What is offered at the end of a line."""
    words = line.split(" ")
    asked = {"COMP_WORDS": line, "COMP_CWORD": str(len(words) - 1)}
    if shell != "bash":
        asked = {"_TYPER_COMPLETE_ARGS": line, "_TYPER_COMPLETE_FISH_ACTION": "get-args"}
    return run(_DRYSTONE_COMPLETE=f"complete_{shell}", **asked, **variables)


def run(*arguments: str, **variables: str) -> subprocess.CompletedProcess[str]:
    return subprocess.run(
        [sys.executable, "-m", "drystone", *arguments],
        capture_output=True, text=True, timeout=60, check=False,
        env=os.environ | {"_TYPER_COMPLETE_TEST_DISABLE_SHELL_DETECTION": "1"} | variables,
    )  # fmt: skip


def test_every_verb_is_offered():
    assert complete("bash", "drystone ").stdout.split() == list(VERBS)


@pytest.mark.parametrize("shell", SHELLS)
def test_a_verb_is_completed(shell: str):
    done = complete(shell, "drystone subm")

    assert done.returncode == 0
    assert done.stderr == ""
    assert "submit" in done.stdout
    assert "plan" not in done.stdout.replace(VERBS["submit"], "")


@pytest.mark.parametrize("shell", SHELLS)
def test_the_options_of_a_verb_are_completed_though_verbs_are_imported_late(shell: str):
    done = complete(shell, "drystone submit --dry")

    assert "--dry-run" in done.stdout
    assert "--debug" not in done.stdout


def test_verbs_of_a_verb_are_completed():
    assert complete("bash", "drystone trace con").stdout.split() == ["convert"]


@pytest.mark.parametrize(
    ("line", "offered"),
    [
        ("drystone plan llama-3-", "llama-3-8b"),
        ("drystone plan gpt2 --gpus 8xA100-80GB-SXM,4xV100-32", "8xA100-80GB-SXM,4xV100-32GB-SXM"),
        ("drystone estimate gpt2 --gpu h100-94", "h100-94GB-NVL"),
        ("drystone estimate gpt2 --precision fp8", "fp8-mixed"),
        ("drystone simulate --policy prices,ce", "prices,cells"),
        ("drystone serve --engine sl", "slurm"),
        ("drystone submit --model mini-g", "mini-gpt"),
    ],
)
def test_names_are_completed(line: str, offered: str):
    done = complete("bash", line)

    assert done.stderr == ""
    assert offered in done.stdout.splitlines()


def test_options_before_a_verb_do_not_hide_it():
    assert complete("bash", "drystone --debug jobs --wat").stdout.split() == ["--watch"]


def test_an_open_quote_is_no_failure():
    done = complete("bash", "drystone submit --name 'a b")

    assert (done.returncode, done.stderr) == (0, "")


def test_without_a_running_system_no_jobs_are_offered(tmp_path: Path):
    done = complete("bash", "drystone show ", DRYSTONE_FOLDER=str(tmp_path))

    assert (done.returncode, done.stdout.strip(), done.stderr) == (0, "", "")


@pytest.mark.parametrize("shell", SHELLS)
def test_the_script_of_each_shell_asks_this_command(shell: str):
    shown = run("--show-completion", shell).stdout

    assert f"_DRYSTONE_COMPLETE=complete_{shell}" in shown


@pytest.mark.parametrize("shell", SHELLS)
def test_completion_is_installed_in_the_home_folder(shell: str, tmp_path: Path):
    done = run("--install-completion", shell, HOME=str(tmp_path))

    assert done.returncode == 0, done.stderr
    written = [file.read_text() for file in tmp_path.rglob("*") if file.is_file()]
    assert any(f"_DRYSTONE_COMPLETE=complete_{shell}" in text for text in written)


@pytest.mark.skipif(shutil.which("bash") is None, reason="there is no bash here")
def test_bash_itself_completes_with_the_script(tmp_path: Path):
    command = tmp_path / "drystone"
    command.write_text(f'#!/bin/sh\nexec "{sys.executable}" -m drystone "$@"\n')
    command.chmod(0o755)
    script = run("--show-completion", "bash").stdout
    lines = (
        script,
        "COMP_WORDS=(drystone can); COMP_CWORD=1",
        f"_drystone_completion {command}",
        'echo "${COMPREPLY[@]}"',
    )
    done = subprocess.run(
        ["bash", "--norc", "-c", "\n".join(lines)],
        capture_output=True, text=True, timeout=60, check=False,
    )  # fmt: skip

    assert done.stdout.strip() == "cancel"
