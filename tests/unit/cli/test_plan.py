"""`drystone plan`: ranked plans, refusals that help, and files that can be read back."""

import json

import pytest

import drystone
from drystone.cli.main import run
from drystone.errors import NothingFits
from drystone.plan.plan import Way, load_plan

MIXED = ["gpt2-xl", "--gpus", "2xL4,A6000,P40", "--global-batch", "64"]


def as_json(capsys, *arguments):
    assert run(["plan", *arguments, "--json"]) == 0
    return json.loads(capsys.readouterr().out)


def test_plans_are_ranked_by_speed_and_all_of_them_fit(capsys):
    plans = [one["plan"] for one in as_json(capsys, *MIXED)["plans"]]

    seconds = [plan["step_seconds"] for plan in plans]
    assert seconds == sorted(seconds)
    for plan in plans:
        for need in plan["needs"]:
            assert need["high_bytes"] <= need["usable_bytes"]


def test_all_three_ways_are_among_them(capsys):
    plans = as_json(capsys, *MIXED)["plans"]

    assert {one["plan"]["way"] for one in plans} == {way.value for way in Way}


def test_the_saved_winner_can_be_read_back(capsys, tmp_path):
    path = tmp_path / "plan.json"
    winner = as_json(capsys, *MIXED, "--save", str(path))["plans"][0]
    plan = load_plan(path)

    assert plan.way.value == winner["plan"]["way"]
    assert plan.to_json() == winner
    assert plan.fits


def test_people_see_why_the_winner_wins(capsys, tmp_path):
    picture = tmp_path / "plans.png"
    arguments = [*MIXED[:1], "--gpus", "4xA100-80G,4xV100-32G", "--plot", str(picture), "--explain"]
    assert run(["plan", *arguments]) == 0
    said = capsys.readouterr()

    assert "fastest:" in said.out
    assert "Time of one step" in said.out
    assert picture.read_bytes().startswith(b"\x89PNG")


def test_ones_own_prices_count(capsys):
    def dollars(price):
        plans = as_json(capsys, "gpt2", "--gpus", "T4", "--prices", f"T4={price}")["plans"]
        return plans[0]["derived"]["dollars_per_billion_tokens"]

    assert dollars(2.0) == pytest.approx(2 * dollars(1.0))


def test_without_gpus_the_answer_is_what_to_get(capsys):
    answers = as_json(capsys, "gpt2-xl")["answers"]

    dollars = [one["cheapest"]["derived"]["dollars_per_billion_tokens"] for one in answers]
    known = [one for one in dollars if one is not None]
    assert known == sorted(known)
    for one in answers:
        fewest = sum(one["smallest"]["derived"]["gpus"].values())
        assert fewest <= sum(one["fastest"]["derived"]["gpus"].values())


def test_when_nothing_fits_the_nearest_miss_and_two_ways_out_are_named(capsys):
    assert run(["plan", "llama-3-8b", "--gpus", "2xT4", "--global-batch", "64"]) == 3
    said = capsys.readouterr().err

    assert "lacks" in said
    assert " or " in said.split("Try")[1]


@pytest.mark.parametrize(
    ("arguments", "words"),
    [
        (["gpt2", "--gpus", "8xA1OO"], "A100"),
        (["gpt2", "--gpus", "0xA100"], "count"),
        (["gpt2", "--gpus", ","], "no GPUs"),
        (["gpt2", "--gpus", "A100", "--prices", "A100=cheap"], "not a price"),
        (["gpt2", "--gpus", "A100", "--prices", "B1000=1"], "B100"),
        (["examples/my_module.py:build_model", "--gpus", "A100"], "estimate"),
    ],
)
def test_a_wrong_request_is_refused(capsys, arguments, words):
    assert run(["plan", *arguments]) == 2
    assert words in capsys.readouterr().err


def test_the_package_can_be_called():
    found = drystone.plan("gpt2", "2xT4")

    assert found.plans[0].fits
    assert found.plans[0].recipe.precision.value == "fp16-mixed"


def test_the_call_refuses_as_the_command_does():
    with pytest.raises(NothingFits, match="no plan fits"):
        drystone.plan("llama-3-70b", "T4")
