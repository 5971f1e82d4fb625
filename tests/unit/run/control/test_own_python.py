"""The Python and the packages of a script's owner are used, and nothing of ours comes before."""

import os
from pathlib import Path

import pytest

from drystone.describe.files.cluster import parse_cluster
from drystone.describe.job import TrainingJob
from drystone.run.control import launches
from drystone.run.control.launches import Seat, make_order
from drystone.run.engines.agent.launches import PYTHON
from drystone.run.engines.contract import Rendezvous

ROOT = str(Path(launches.__file__).resolve().parents[3])


@pytest.fixture(autouse=True)
def _no_inherited_path(monkeypatch):
    monkeypatch.delenv("PYTHONPATH", raising=False)


def request_of(tmp_path, command: str, **environment: str) -> dict:
    job = TrainingJob(
        name="a",
        command=tuple(command.split()),
        num_steps=1,
        environment=tuple(environment.items()),
        folder=str(tmp_path),
    )
    order = make_order(
        job,
        job_id="1",
        epoch=1,
        num_steps=1,
        plan=None,
        seats=[Seat(node="n", gpu="T4", device=0)],
        rendezvous=Rendezvous(address="127.0.0.1", port=1),
        cluster=parse_cluster("nodes: [{gpu: T4}]"),
        folder=tmp_path,
        lease_seconds=1.0,
    )
    return order.requests["n"]


def test_an_interpreter_of_ones_own_gets_none_of_our_paths(tmp_path, monkeypatch):
    monkeypatch.setenv("PYTHONPATH", "/of/the/service")
    request = request_of(tmp_path, "/mine/bin/python train.py")

    assert request["arguments"][0] == "/mine/bin/python"
    assert request["environment"]["PYTHONPATH"] == ""


def test_a_path_of_ones_own_finds_python(tmp_path):
    request = request_of(tmp_path, "python train.py", PATH="/mine/bin")

    assert request["arguments"] == ["python", "train.py"]
    assert request["environment"]["PATH"] == "/mine/bin"
    assert request["environment"]["PYTHONPATH"] == ""


def test_modules_of_ones_own_come_before_ours(tmp_path):
    request = request_of(tmp_path, "python train.py", PYTHONPATH="/mine/modules")

    assert request["arguments"][0] == PYTHON
    assert request["environment"]["PYTHONPATH"].split(os.pathsep) == ["/mine/modules", ROOT]


def test_a_folder_of_installed_packages_is_not_put_before_the_standard_library(
    tmp_path, monkeypatch
):
    installed = tmp_path / "site-packages/drystone/run/control/launches.py"
    monkeypatch.setattr(launches, "__file__", str(installed))

    assert request_of(tmp_path, "python train.py")["environment"]["PYTHONPATH"] == ""


def test_variables_of_the_job_go_before_our_defaults(tmp_path):
    request = request_of(tmp_path, "python train.py", PYTHONUNBUFFERED="")

    assert request["environment"]["PYTHONUNBUFFERED"] == ""
