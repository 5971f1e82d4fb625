"""What `drystone submit` shows before it asks."""

from pathlib import Path

import pytest

from drystone.cli.submit import Limits, Work, _described, _range, _show_plan
from drystone.errors import InvalidSpec


def option(*, is_free: bool, where: str = "") -> dict:
    return {
        "gpus": {"A100-80GB-SXM": 2}, "samples_per_second": 50.0, "seconds": 15.6, "dollars": 0.02,
        "dollars_per_hour": 3.6, "is_free": is_free, "is_measured": False,
        "where": where or ("free" if is_free else "taken"),
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


@pytest.mark.parametrize("where", ["to rent", "on its way"])
def test_what_is_still_to_be_rented_is_not_called_taken(where: str, capsys):
    one = option(is_free=False, where=where)
    job = {"name": "mine", "model": "mini-gpt", "command": []}

    _show_plan({"chosen": one, "options": [one], "job": job, "steps": 100, "num_waiting": 0})

    shown = capsys.readouterr()
    assert "Once rented it would get 2 A100" in shown.err
    assert where in shown.out
    assert "taken" not in shown.err + shown.out


def test_a_command_after_two_dashes_is_a_job():
    body = _described(["python", "train.py", "--lr", "3e-4"], Work(steps="5").keys(), {})

    assert body["job"]["command"] == "python train.py --lr 3e-4"
    assert body["job"]["train"] == {"steps": "5"}


def test_limits_beside_a_file_go_before_what_it_says(tmp_path: Path):
    file = tmp_path / "mine.yaml"
    file.write_text("model: mini-gpt\ngpus: {min: 2, deny: [T4-16GB]}\ntrain: {steps: 3}\n")

    limits = Limits(max_gpus=4, gpu_type=["A100-80G"], deadline="6h", priority=2.0)
    body = _described([str(file)], {}, limits.keys())

    job = body["job"]
    assert job["gpus"] == {"min": 2, "max": 4, "allow": ["A100-80G"], "deny": ["T4-16GB"]}
    assert (job["name"], job["deadline"], job["priority"]) == ("mine", "6h", 2.0)
    assert job["train"] == {"steps": 3}
    assert body["folder"] == str(tmp_path)


def test_a_file_and_other_work_are_refused_and_named(tmp_path: Path):
    file = tmp_path / "mine.yaml"
    file.write_text("model: mini-gpt\ntrain: {steps: 3}\n")

    with pytest.raises(InvalidSpec, match="--steps"):
        _described([str(file)], Work(steps="5").keys(), {})


@pytest.mark.parametrize(("text", "found"), [("4", (4, 4)), ("2-8", (2, 8))])
def test_a_number_of_gpus_or_a_range(text: str, found: tuple[int, int]):
    assert _range(text) == found


@pytest.mark.parametrize("text", ["0", "4xA100-80G", "-2", "8-2-1", "many"])
def test_what_is_no_number_of_gpus_is_refused_with_what_to_write(text: str):
    with pytest.raises(InvalidSpec) as refused:
        _range(text)

    assert "--gpu-type" in refused.value.hint
