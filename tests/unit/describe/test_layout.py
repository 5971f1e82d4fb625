"""Layouts: degrees of experts, and stages that embedding and loss help to fill."""

import pytest

from drystone.describe.layout import Layout, Layouts, check_layout, parse_layout
from drystone.describe.model_source import find_model
from drystone.describe.recipe import Recipe
from drystone.errors import InvalidSpec

RECIPE = Recipe(seq_len=4096, global_batch=8192)


@pytest.mark.parametrize(
    ("text", "expert_tp"),
    [("dp=4,tp=2", 2), ("dp=4,tp=2,ep=8", 1), ("dp=4,tp=4,ep=2,etp=2", 2), ("dp=4,tp=2,etp=1", 1)],
)
def test_experts_are_divided_by_tp_only_where_nothing_else_divides_them(text, expert_tp):
    layout = parse_layout(text)

    assert layout.expert_tp == expert_tp
    assert Layouts.of([layout]).etp.tolist() == [expert_tp]


def test_a_stated_degree_of_experts_is_written_back():
    text = "dp=4,tp=4,pp=1,ep=2,etp=2,micro=1"

    assert str(parse_layout(text)) == text
    assert "etp" not in str(parse_layout("dp=4,tp=4,ep=2"))


def test_experts_need_as_many_ranks_as_a_stage_has():
    with pytest.raises(InvalidSpec, match=r"ep x etp = 4 x 2 does not divide dp x cp x tp = 4"):
        Layout(dp=2, tp=2, ep=4, etp=2)
    with pytest.raises(InvalidSpec, match="etp is -1"):
        Layout(etp=-1)


def test_embedding_and_loss_stand_in_the_place_of_layers():
    """94 layers on 96 virtual stages, and 126 on 128, as NVIDIA publishes them."""
    qwen, llama = find_model("qwen3-235b-a22b"), find_model("llama-3.1-405b")

    assert check_layout(qwen, RECIPE, Layout(dp=32, pp=8, virtual_stages=12)) == []
    assert check_layout(llama, RECIPE, Layout(dp=2, tp=4, pp=16, virtual_stages=8)) == []
    assert check_layout(qwen, RECIPE, Layout(dp=32, pp=8, virtual_stages=13))
    assert check_layout(qwen, RECIPE, Layout(pp=95))
