"""`drystone verify` as a person runs it, on emulated devices."""

import json

import pytest

pytest.importorskip("torch")

from drystone.cli.main import run
from drystone.describe.pool import parse_pool
from drystone.run.train import verify as rank_verify
from drystone.run.verify import checks
from drystone.run.verify.ranks import Devices, Ended, run_ranks

pytestmark = [pytest.mark.torch, pytest.mark.filterwarnings("default")]


@pytest.mark.slow
def test_everything_is_tried_and_reported(tmp_path, capsys):
    report = tmp_path / "verify.json"
    code = run(["verify", "--devices", "2xT4", "--quick", "--report", str(report), "--json"])

    printed = json.loads(capsys.readouterr().out)
    assert code == 0
    assert printed == json.loads(report.read_text())
    told = report.with_suffix(".txt").read_text()
    assert all(f"{check['name']} (" in told for check in printed["checks"])
    assert told.startswith("drystone verify on 2xT4")
    assert "torch " in told
    assert f"{len(printed['checks'])} of {len(printed['checks'])} checks passed" in told
    names = [check["name"] for check in printed["checks"]]
    assert {check["outcome"] for check in printed["checks"]} == {"passed"}
    for part in ("collectives", "dp=2", "uneven shares", "tp=2", "pp=2", "kill a rank", "resize"):
        assert any(part in name for name in names), part


def test_wrong_losses_and_ranks_that_die_are_failures(tmp_path):
    trial = checks.Trial(
        pool=parse_pool("2xT4"),
        devices=Devices(numbers={}, is_emulated=True),
        folder=tmp_path,
    )
    expected = {1: 6.25, 2: 6.2}
    reports = [{"event": "step", "step": step, "loss": loss} for step, loss in expected.items()]
    well = Ended(exit_codes=(0, 0), is_hung=False, message="")
    died = Ended(exit_codes=(1, 0), is_hung=False, message="rank 0: NCCL error")
    off = [{**reports[0], "loss": 6.3}, reports[1]]

    def outcome(found, ended) -> tuple[str, str]:
        check = checks._loss_check(trial, "x", expected, found, ended)
        return check.outcome.value, check.detail

    assert outcome(reports, well)[0] == "passed"
    assert outcome(off, well)[0] == "failed"
    assert outcome(reports[:1], died) == ("failed", "rank 0: NCCL error")


def test_ranks_that_fail_are_quoted(tmp_path):
    devices = Devices(numbers={}, is_emulated=True)
    ended = run_ranks(["drystone.run.train", "/no/such/plan"], ["T4"], devices, tmp_path)

    assert not ended.is_well
    assert "/no/such/plan" in ended.message


def test_a_wrong_sum_is_seen(monkeypatch):
    import torch

    from drystone.run.train.collectives import Wire

    wire = Wire()
    assert rank_verify.check_collectives(wire, torch.device("cpu")) == {"float32": []}
    monkeypatch.setattr(
        Wire, "gather", lambda self, piece, flat, cuts, form=None: self.sum(flat.fill_(5))
    )
    assert rank_verify.check_collectives(wire, torch.device("cpu"))["float32"]


@pytest.mark.parametrize("devices", ["9xT4", "2xQ7", "twoxT4"])
def test_devices_that_cannot_be_tried_are_refused(devices, capsys):
    assert run(["verify", "--devices", devices]) == 2
    assert "Traceback" not in capsys.readouterr().err
