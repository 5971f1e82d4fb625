"""Measuring the device that is here: the profile that comes out, and what is refused."""

import json
from pathlib import Path

import pytest

from drystone.cli.profile import profile
from drystone.errors import RequestError
from drystone.estimate.learned.profile import fit_matmuls, load_profile

pytest.importorskip("torch")


@pytest.mark.slow
@pytest.mark.torch
def test_a_quick_measurement_writes_a_profile_that_estimates_can_use(tmp_path: Path, capsys):
    target = tmp_path / "here.json"

    profile(out=target, quick=True, as_json=True)

    measured = load_profile(target)
    assert measured == type(measured).model_validate(json.loads(capsys.readouterr().out))
    assert fit_matmuls(measured.matmuls).flops > 1e8
    assert measured.memory_bandwidth_bytes_per_second > 1e8
    assert 0 < measured.launch_seconds < 1e-2
    assert {one.ranks for one in measured.collectives} == {2}
    assert measured.attention[0].forward_seconds > 0
    assert "in bursts" in measured.source


@pytest.mark.parametrize("name", ["profile.txt", "nowhere/profile.json"])
def test_a_target_that_cannot_be_written_is_refused_before_measuring(tmp_path: Path, name: str):
    with pytest.raises(RequestError):
        profile(out=tmp_path / name)


@pytest.mark.torch
def test_under_load_calls_follow_each_other_for_as_long_as_it_holds(monkeypatch):
    import torch

    from drystone.run.train import measure

    now = [0.0]
    monkeypatch.setattr(measure.time, "perf_counter", lambda: now[0])
    settings = measure._Settings(
        device=torch.device("cpu"),
        dtype=torch.float32,
        shapes=((8, 8, 8),),
        copy_elements=8,
        repeats=4,
        num_ranks=1,
        heat_seconds=0.0,
        hold_seconds=30.0,
        attention=(1, 1, 8, 8),
    )

    def work() -> None:
        now[0] += 1.0 if now[0] < 3.0 else 2.0  # the clock falls as the device warms

    seconds = measure._seconds_of(work, settings)

    assert 1.8 < seconds < 2.0  # what a long run sees, not what the first calls took
    assert now[0] >= 30.0
