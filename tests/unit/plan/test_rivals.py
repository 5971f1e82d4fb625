"""Rivals of a plan: executed, of other kinds, and no slower than the estimate may be wrong."""

import pytest

from drystone.describe.model_source import find_model
from drystone.describe.pool import make_pool, parse_pool
from drystone.describe.recipe import Precision, Recipe
from drystone.plan.cells.search import search_cells
from drystone.plan.executable import marked
from drystone.plan.rivals import ESTIMATE_ERROR, MAX_RIVALS, plan_words, rival_plans
from drystone.plan.search import plan_executable

CASES = [
    ("llama-3-8b", "16xH100", 128),
    ("llama-3-8b", "8xA100-80G", 64),
    ("gpt2-xl", "4xV100-32G", 64),
    ("qwen2.5-14b", "16xA100-80G", 128),
]


def ask(name: str, text: str, batch: int):
    model, [group] = find_model(name), parse_pool(text).groups
    recipe = Recipe(seq_len=2048, global_batch=batch, precision=Precision.FP16_MIXED)
    best = plan_executable(model, recipe, make_pool([group]))
    return model, recipe, group, best, rival_plans(model, recipe, group, best)


@pytest.mark.parametrize(("name", "text", "batch"), CASES)
def test_rivals_are_ways_that_could_be_faster(name, text, batch):
    _, _, group, best, rivals = ask(name, text, batch)

    assert len(rivals) <= MAX_RIVALS
    words = [plan_words(plan) for plan in (best, *rivals)]
    assert len(set(words)) == len(words)
    for rival in rivals:
        assert best.step_seconds <= rival.step_seconds * (1 + 1e-9)
        assert rival.step_seconds <= best.step_seconds * (1 + ESTIMATE_ERROR)
        assert rival.gpus == {group.gpu.name: group.count}
        assert rival.fits
        assert not marked(rival).not_executable


def test_some_plans_have_rivals_and_all_near_degrees_are_among_them():
    found = {case: ask(*case) for case in CASES}
    assert any(rivals for *_, rivals in found.values())
    for model, recipe, group, best, rivals in found.values():
        if len(rivals) == MAX_RIVALS:
            continue
        cells = search_cells(model, recipe, group.machine, (group.count,))
        degrees = {(best.stages[0].tp, len(best.stages))}
        degrees |= {(rival.stages[0].tp, len(rival.stages)) for rival in rivals}
        near = cells.step_seconds <= best.step_seconds * (1 + ESTIMATE_ERROR)
        for index in near.nonzero()[0].tolist():
            layout = cells.layout(index)
            is_plain = layout.cp == layout.ep == 1 and (layout.tp * layout.pp > 1)
            assert not is_plain or (layout.tp, layout.pp) in degrees


def test_one_gpu_has_nothing_to_try():
    assert ask("gpt2-xl", "1xV100-32G", 8)[-1] == ()
