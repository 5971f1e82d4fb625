"""What readings of one's own say about the next run."""

from dataclasses import replace

import pytest

from drystone.describe.catalogue import find_gpu
from drystone.describe.layout import parse_layout
from drystone.describe.machine import default_machine
from drystone.describe.model_source import find_model
from drystone.describe.recipe import Recipe
from drystone.estimate.learned.pooled import Kind, Spreads, correct, kind_of, shipped_spreads
from drystone.estimate.learned.profile import Profile, Reading, save_profile
from drystone.estimate.whole import estimate_layout

SPREADS = Spreads(launcher=0.1, gpu=0.1, family=0.1, work=0.1, run=0.1, chance=0.03)
KIND = Kind("drystone", "A100", "llama", "8b", "8b on 8")


def reading(ratio: float, **changes: str) -> Reading:
    return Reading(measure="speed", ratio=ratio, **KIND._replace(**changes)._asdict())


def test_nothing_is_learned_from_nothing_or_from_what_has_nothing_in_common() -> None:
    assert correct([], KIND, SPREADS).factor == 1.0
    other = reading(2.0, launcher="x", gpu="y", family="z", work="w", run="v")
    found = correct([other], KIND, SPREADS)
    assert (found.factor, found.width_share, found.num_readings) == (1.0, 1.0, 0)


def test_names_that_are_not_known_have_nothing_in_common() -> None:
    nameless = Kind("", "", "", "", "")
    unknown = reading(2.0, launcher="", gpu="", family="", work="", run="")
    assert correct([unknown], nameless, SPREADS).factor == 1.0


def test_the_nearer_a_reading_the_more_it_says() -> None:
    levels = ({}, {"run": "-"}, {"run": "-", "work": "-"}, {"run": "-", "work": "-", "family": "-"})
    factors = [correct([reading(1.3, **other)], KIND, SPREADS) for other in levels]
    assert sorted((one.factor for one in factors), reverse=True) == [f.factor for f in factors]
    assert sorted(one.width_share for one in factors) == [one.width_share for one in factors]
    assert 1.2 < factors[0].factor < 1.3
    assert 1.0 < factors[-1].factor < 1.15


def test_more_readings_of_the_same_run_come_nearer_and_narrow_the_range() -> None:
    one, many = correct([reading(1.2)], KIND, SPREADS), correct([reading(1.2)] * 9, KIND, SPREADS)
    assert one.factor < many.factor < 1.2
    assert many.width_share < one.width_share < 1
    low, high = many.scaled_range(0.5, 2.0)
    assert 0.5 < low < many.factor < high < 2.0


def test_one_reading_far_from_all_others_hardly_moves_another_run() -> None:
    alike = [reading(1.1, run=f"run {number}") for number in range(6)]
    usual = correct(alike, KIND, SPREADS).factor
    with_outlier = correct([*alike, reading(9.0, run="broken")], KIND, SPREADS).factor
    assert with_outlier == pytest.approx(usual, rel=0.06)


def test_parts_multiply_to_the_factor() -> None:
    found = correct([reading(1.2), reading(0.9, work="other", run="-")], KIND, SPREADS)
    product = 1.0
    for part in found.parts.values():
        product *= part
    assert product == pytest.approx(found.factor)


MODEL = find_model("llama-3-8b")
RECIPE = Recipe(seq_len=4096, global_batch=64)
LAYOUT = parse_layout("dp=8,micro=1,zero=3")
GPU = find_gpu("A100-80G")


def _profile(speed: float, memory: float, **changes: str) -> Profile:
    kind = kind_of(MODEL, RECIPE, LAYOUT, GPU.name)._replace(**changes)._asdict()
    return Profile(
        device=GPU.name,
        readings=(
            Reading(measure="speed", ratio=speed, **kind),
            Reading(measure="memory", ratio=memory, **kind),
        ),
    )


def test_an_estimate_moves_by_just_what_its_readings_say() -> None:
    machine = default_machine(GPU)
    plain = estimate_layout(MODEL, RECIPE, LAYOUT, machine)
    told = estimate_layout(MODEL, RECIPE, LAYOUT, machine, profile=_profile(1.4, 1.1))
    speed, memory = told.learned["speed"], told.learned["memory"]
    assert told.speed.step_seconds / plain.speed.step_seconds == pytest.approx(speed.factor, 0.01)
    assert 1.25 < speed.factor < 1.4
    ratio = told.hungriest.device_bytes / plain.hungriest.device_bytes
    assert ratio == pytest.approx(memory.factor)
    assert sum(told.hungriest.items.values()) == pytest.approx(told.hungriest.device_bytes)
    width = told.hungriest.high_bytes / told.hungriest.low_bytes
    assert width < plain.hungriest.high_bytes / plain.hungriest.low_bytes


def test_a_gpu_type_with_a_profile_is_estimated_by_it(tmp_path) -> None:  # type: ignore[no-untyped-def]
    path = tmp_path / "profile.json"
    save_profile(_profile(1.5, 1.0, run="another", family="another"), path)
    plain = estimate_layout(MODEL, RECIPE, LAYOUT, default_machine(GPU))
    measured = default_machine(replace(GPU, profile=str(path)))
    told = estimate_layout(MODEL, RECIPE, LAYOUT, measured)
    assert told.speed.step_seconds > 1.15 * plain.speed.step_seconds


def test_spreads_ship_for_both_measures() -> None:
    for measure in ("memory", "speed"):
        assert all(0 < spread < 1 for spread in shipped_spreads(measure))
