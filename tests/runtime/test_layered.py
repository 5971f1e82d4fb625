"""Models that know nothing of the engine: Hugging Face's, and what is refused."""

import sys
from pathlib import Path

import pytest

pytest.importorskip("torch")

import torch
from torch import nn

sys.path.insert(0, str(Path(__file__).parent))
from engine_cases import UserModel
from huggingface_cases import BLOCKS, plain_gradients, uneven_gradients_of_all
from ranks import run_ranks

from drystone.errors import InvalidSpec, UnknownName
from drystone.run.train.data import RankWork
from drystone.run.train.models.layered import NamedBlocks
from drystone.run.train.uneven.engine import Engine

pytestmark = [pytest.mark.torch, pytest.mark.filterwarnings("default")]


@pytest.mark.slow
def test_models_of_transformers_equal_themselves_on_one_device():
    pytest.importorskip("transformers")
    works = [
        RankWork(batch=1, micro_batch=1, state_share=0.3),
        RankWork(batch=4, micro_batch=3, state_share=0.7),
    ]

    by_rank = run_ranks(uneven_gradients_of_all, 2, works)

    for kind in BLOCKS:
        loss, gradients = plain_gradients(kind, 5)
        seen = dict.fromkeys(gradients, 0)
        for rank in by_rank:
            assert rank[kind][0] == pytest.approx(loss, abs=1e-6)
            for name, start, end, values in rank[kind][1]:
                expected = gradients[name].flatten()[start:end]
                assert torch.allclose(values, expected, rtol=0, atol=1e-6), (kind, name)
                seen[name] += end - start
        assert seen == {name: one.numel() for name, one in gradients.items()}


def test_a_wrong_name_of_the_blocks_is_refused_with_the_right_one():
    with pytest.raises(UnknownName, match=r"trunk\.layers"):
        NamedBlocks(UserModel(), "trunk.layer")


def test_a_parameter_shared_by_blocks_is_refused():
    model = UserModel()
    model.trunk.layers[1].inner.weight = model.trunk.layers[0].inner.weight

    with pytest.raises(InvalidSpec, match="shared by blocks"):
        Engine(NamedBlocks(model, "trunk.layers"), [1.0])


def test_blocks_may_stand_in_any_container_of_modules():
    blocks = [nn.Linear(2, 2), nn.Linear(2, 2)]

    class Chain(nn.Module):
        def __init__(self, container: nn.Module) -> None:
            super().__init__()
            self.blocks = container

        def forward(self, x: torch.Tensor) -> torch.Tensor:
            return self.blocks(x).square().mean()

    model = Chain(nn.Sequential(*blocks))
    batch = torch.ones(3, 2)
    layered = NamedBlocks(model, "blocks")
    hidden, extras = layered.embed(batch)
    for index in range(2):
        hidden = layered.run_block(index, hidden, extras)

    assert torch.allclose(layered.loss_sum(hidden, batch) / 3, model(batch))
    assert NamedBlocks(Chain(nn.ModuleDict({"a": blocks[0]})), "blocks").blocks == blocks[:1]


def test_blocks_that_are_never_called_are_refused():
    class Idle(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.blocks = nn.ModuleList([nn.Linear(2, 2)])

        def forward(self, x: torch.Tensor) -> torch.Tensor:
            return x.sum()

    with pytest.raises(InvalidSpec, match="never calls"):
        NamedBlocks(Idle(), "blocks").embed(torch.ones(2, 2))


def test_as_many_shares_as_ranks():
    with pytest.raises(InvalidSpec, match="2 state shares for 1 ranks"):
        Engine(NamedBlocks(UserModel(), "trunk.layers"), [1.0, 1.0])
