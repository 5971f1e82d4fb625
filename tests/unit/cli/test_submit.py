"""What `drystone submit` shows before it asks."""

import pytest

from drystone.cli.submit import _show_plan


def option(*, is_free: bool) -> dict:
    return {
        "gpus": {"A100-80GB-SXM": 2}, "samples_per_second": 50.0, "seconds": 15.6, "dollars": 0.02,
        "dollars_per_hour": 3.6, "is_free": is_free, "is_measured": False,
    }  # fmt: skip


@pytest.mark.parametrize(
    ("is_free", "says"),
    [(True, "Now it would get 2 A100"), (False, "taken; alone it would get 2 A100")],
)
def test_gpus_that_others_have_are_not_promised(is_free: bool, says: str, capsys):
    one = option(is_free=is_free)
    job = {"name": "mine", "model": "mini-gpt", "command": []}

    _show_plan({"chosen": one, "options": [one], "job": job, "steps": 100, "num_waiting": 0})

    assert says in capsys.readouterr().err
