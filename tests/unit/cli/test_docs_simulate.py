"""The commands of docs/simulate.md run as they are written there."""

import shlex
import shutil
from pathlib import Path

import pytest

from drystone.cli.main import run

ROOT = Path(__file__).resolve().parents[3]


def documented_commands() -> list[list[str]]:
    text = (ROOT / "docs" / "simulate.md").read_text(encoding="utf-8")
    lines = text.replace("\\\n", " ").splitlines()
    return [shlex.split(line)[1:] for line in lines if line.startswith("drystone ")]


def enter(folder: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    shutil.copytree(ROOT / "examples" / "simulate", folder / "examples" / "simulate")
    monkeypatch.chdir(folder)


def test_the_example_is_what_the_documented_command_generates(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys
):
    enter(tmp_path, monkeypatch)
    command = next(one for one in documented_commands() if one[:2] == ["trace", "generate"])

    assert run(command) == 0

    assert (tmp_path / "jobs.csv").read_text() == (
        ROOT / "examples" / "simulate" / "jobs.csv"
    ).read_text()


@pytest.mark.slow
def test_every_documented_command_runs(tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys):
    enter(tmp_path, monkeypatch)
    commands = documented_commands()

    assert len(commands) >= 5
    for command in commands:
        # With fewer jobs: what is documented takes minutes.
        fewer = ["--most-jobs", "6"] if command[0] in ("simulate", "frontier") else []
        assert run([*command, *fewer]) == 0, command
    assert (tmp_path / "out.html").exists()
    assert (tmp_path / "frontier.png").exists()
