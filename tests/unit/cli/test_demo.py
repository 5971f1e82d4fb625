"""The demo where torch is not installed."""

import importlib.util

import pytest

from drystone.cli import demo
from drystone.cli.main import run


@pytest.fixture
def _no_torch(monkeypatch):
    found = importlib.util.find_spec
    monkeypatch.setattr(
        importlib.util, "find_spec", lambda name: None if name == "torch" else found(name)
    )


@pytest.mark.usefixtures("_no_torch")
def test_without_torch_the_last_act_is_left_out_and_said_to_be(monkeypatch, capsys):
    monkeypatch.setattr(demo, "_ACTS", (("Which GPU?", "gpus T4"),))

    assert run(["demo"]) == 0
    shown, told = capsys.readouterr()
    assert "T4-16GB" in shown
    assert "Left out: the last act trains" in told
    assert "drystone[runtime]" in told


@pytest.mark.usefixtures("_no_torch")
def test_who_asks_for_the_last_act_alone_is_refused(capsys):
    assert run(["demo", "--only", "5"]) == 2
    assert "drystone[runtime]" in capsys.readouterr().err
