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


@pytest.mark.parametrize("name", ["profile.txt", "nowhere/profile.json"])
def test_a_target_that_cannot_be_written_is_refused_before_measuring(tmp_path: Path, name: str):
    with pytest.raises(RequestError):
        profile(out=tmp_path / name)
