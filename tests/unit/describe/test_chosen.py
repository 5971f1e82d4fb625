"""Constants that were chosen by looking at runs: each has a value without each of its sources."""

from dataclasses import replace

import pytest

from drystone.describe.catalogue import find_gpu
from drystone.describe.chosen import load_choices, name_without, split_name, values_without
from drystone.describe.generations import find_generation, generation_of
from drystone.errors import UnknownName
from drystone.estimate.launchers import LAUNCHERS, find_launcher


def test_a_name_says_which_source_is_left_out():
    assert split_name(name_without("torch-fsdp", "litgpt")) == ("torch-fsdp", "litgpt")
    assert split_name("torch-fsdp") == ("torch-fsdp", "")


@pytest.mark.parametrize("choice", load_choices(), ids=lambda one: f"{one.owners[0]} {one.field}")
def test_every_choice_names_what_the_code_holds(choice):
    for owner in choice.owners:
        if choice.kind == "generation":
            held = getattr(find_generation(owner), choice.field)
        else:
            launcher = LAUNCHERS[owner]
            held = getattr(launcher.speed if choice.kind == "speed" else launcher, choice.field)
        assert isinstance(held, (int, float))
    assert choice.without.keys() == choice.num_runs.keys()
    assert {choice.prior, *choice.without.values()} <= set(choice.candidates)


def test_what_only_one_source_speaks_for_is_not_known_without_it():
    """Galvatron's habits were inferred from Galvatron's readings alone."""
    assert find_launcher("galvatron").gradients_persist
    unseen = find_launcher("galvatron without galvatron")
    assert not unseen.gradients_persist
    assert unseen.root_stays_gathered
    # Another source says nothing of it.
    assert find_launcher("galvatron without litgpt").gradients_persist


def test_the_speed_of_a_launcher_and_of_a_generation_are_chosen_again_too():
    values = values_without("llmfoundry", kind="speed", owner="composer")
    assert find_launcher("composer without llmfoundry").speed.attention_share == 1.0
    assert values["attention_share"] == 1.0
    gpu = find_gpu("MI300X")
    unseen = replace(gpu, architecture=name_without(gpu.architecture, "torchtitan"))
    assert generation_of(unseen).sustained_share != generation_of(gpu).sustained_share
    assert generation_of(unseen).ceiling_share == generation_of(gpu).ceiling_share


def test_an_unknown_launcher_stays_unknown():
    with pytest.raises(UnknownName):
        find_launcher("megatron-xl without litgpt")
