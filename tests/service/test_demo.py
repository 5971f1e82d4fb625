"""The last act of the demo, as a person would see it."""

import pytest

pytest.importorskip("torch")
pytest.importorskip("transformers")

from drystone.cli.main import run

pytestmark = [pytest.mark.slow, pytest.mark.torch]


def test_the_live_act_ends_well_and_tells_the_story(capsys):
    assert run(["demo", "--only", "5"]) == 0
    told = capsys.readouterr().out

    assert "Killed on purpose" in told
    assert "was interrupted: crash: rank 0: died of SIGKILL" in told
    assert told.count("is done") == 2
    assert "uneven, batches" in told  # on unlike GPUs at once
    assert "gets GPUs: " in told
    before, after = told.rpartition("before ")[2].split("after ")
    assert "white" not in before
    assert after.split("\n")[0].strip() == "The colour of snow is white."
