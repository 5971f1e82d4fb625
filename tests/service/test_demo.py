"""The last act of the demo, as a person would see it."""

import pytest

pytest.importorskip("torch")

from drystone.cli.main import run

pytestmark = [pytest.mark.slow, pytest.mark.torch]


def test_the_live_act_ends_well_and_tells_the_story(capsys):
    assert run(["demo", "--only", "7"]) == 0
    told = capsys.readouterr().out

    assert "Killed on purpose" in told
    assert "interrupted: crash: rank 0: died of SIGKILL\n" in told
    assert told.count("finished") == 4
    assert "no such data set" in told
    assert "1 A100-80GB-SXM + 2 T4-16GB" in told or "2 A100-80GB-SXM + " in told
