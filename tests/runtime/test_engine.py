"""Uneven training against plain training on one device: gradients, losses, collectives."""

import random
import sys
from pathlib import Path

import pytest

pytest.importorskip("torch")

import torch
from torch import nn

sys.path.insert(0, str(Path(__file__).parent))
from engine_cases import Case, a_model, tokens, train_plainly, train_unevenly, whole_gradients
from ranks import run_ranks

from drystone.run.train.models.layered import NamedBlocks
from drystone.run.train.uneven.engine import Engine

pytestmark = [pytest.mark.torch, pytest.mark.filterwarnings("default")]


def a_random_case(chance: random.Random, num_ranks: int) -> Case:
    """Batches, micro-batches and shares of any size; zeros are likely, all zero is not allowed."""
    batches = [chance.choice((0, 1, 2, 3, 5)) for _ in range(num_ranks)]
    batches[chance.randrange(num_ranks)] += 1
    shares = [chance.choice((0.0, 0.0, 1.0, chance.random())) for _ in range(num_ranks)]
    shares[chance.randrange(num_ranks)] += 0.5
    if chance.random() < 0.3:
        shares = [1.0] * num_ranks
    return Case(
        batches=tuple(batches),
        micros=tuple(chance.randint(1, 3) for _ in range(num_ranks)),
        shares=tuple(shares),
        style=chance.choice(("gpt", "llama", "user")),
        tied=chance.random() < 0.5,
        clip=chance.choice((0.0, 0.05)),
        num_layers=chance.choice((1, 2, 3)),
        held=chance.choice(("layers", "all", "replicated")),
        recompute=chance.choice(("none", "selective", "full", "full/2")),
    )


def check_equal(case: Case, ranks: list[list[tuple]], *, tolerance: float = 1e-6) -> None:
    """Every rank reports the true loss and norm; the pieces make up the true gradient."""
    plain = train_plainly(case)
    for step, (loss, norm, gradients) in enumerate(plain):
        for rank in ranks:
            assert rank[step][0] == pytest.approx(loss, abs=1e-5), (case, step)
            assert rank[step][1] == pytest.approx(norm, rel=1e-5), (case, step)
        found = whole_gradients(ranks, step, gradients)
        for name, gradient in gradients.items():
            difference = (found[name] - gradient).abs().max().item()
            assert difference <= tolerance, (case, step, name, difference)


@pytest.mark.slow
@pytest.mark.parametrize("num_ranks", [2, 3, 4])
def test_random_uneven_splits_equal_a_single_device(num_ranks: int):
    chance = random.Random(100 + num_ranks)
    cases = [a_random_case(chance, num_ranks) for _ in range(24)]

    by_rank = run_ranks(train_unevenly, num_ranks, cases)

    for index, case in enumerate(cases):
        check_equal(case, [results[index] for results in by_rank])


@pytest.mark.slow
def test_a_rank_without_state_and_a_rank_without_samples():
    case = Case(batches=(0, 3), micros=(1, 2), shares=(1.0, 0.0), tied=True, clip=0.05)

    ranks = run_ranks(train_unevenly, 2, [case])

    check_equal(case, [one[0] for one in ranks])
    assert ranks[1][0][0][2] == []


def test_one_process_without_a_process_group_is_plain_training():
    case = Case(batches=(5,), micros=(2,), shares=(1.0,), style="llama", clip=0.05)

    check_equal(case, train_unevenly([case]))


@pytest.mark.parametrize("recompute", ["none", "selective", "full", "full/2"])
@pytest.mark.parametrize("style", ["gpt", "llama", "user"])
def test_whole_weights_are_plain_training_whatever_is_recomputed(recompute: str, style: str):
    case = Case(
        batches=(5,), micros=(2,), shares=(1.0,), style=style, clip=0.05, held="all",
        recompute=recompute, tied=recompute == "none",
    )  # fmt: skip

    check_equal(case, train_unevenly([case]))


def test_sixteen_bit_compute_stays_near_and_accumulates_in_fp32():
    case = Case(batches=(8,), micros=(1,), shares=(1.0,), style="llama", steps=1)
    exact = train_plainly(case)[0]
    engine = Engine(a_model(case), [1.0], dtype=torch.bfloat16)

    result = engine.compute_gradients([tokens().read([one]) for one in range(8)])

    assert result.loss == pytest.approx(exact[0], rel=2e-2)
    assert result.gradient_norm == pytest.approx(exact[1], rel=2e-2)
    for one in engine.owned:
        assert one.value.dtype == one.value.grad.dtype == torch.float32
        expected = exact[2][one.name].flatten()
        assert torch.nn.functional.cosine_similarity(one.value.grad, expected, dim=0) > 0.99


class Recording(nn.Module):
    """A block with chance in it that remembers what it returned."""

    def __init__(self) -> None:
        super().__init__()
        self.inner, self.seen = nn.Linear(8, 8), []

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        out = nn.functional.dropout(self.inner(x), 0.5)
        self.seen.append(out.detach())
        return out


def test_dropout_is_drawn_again_as_it_was():
    model = nn.Module()
    model.blocks = nn.ModuleList(Recording() for _ in range(2))
    model.forward = lambda x: model.blocks[1](model.blocks[0](x)).square().mean()
    x = torch.ones(4, 8)

    Engine(NamedBlocks(model, "blocks"), [1.0]).compute_gradients([x, x])

    for block in model.blocks:
        first, second, *again = block.seen
        assert torch.equal(first, again[0])
        assert torch.equal(second, again[1])
        assert not torch.equal(first == 0, second == 0)


@pytest.mark.slow
def test_fifty_losses_stay_those_of_a_single_device():
    cases = [
        Case(batches=(1, 5, 0), micros=(1, 2, 1), shares=(0.5, 0.0, 0.5), steps=50, clip=1.0),
        Case(batches=(2, 1, 3), micros=(1, 1, 2), shares=(1, 2, 5), steps=50, style="llama",
             tied=True, clip=0.1),
    ]  # fmt: skip

    by_rank = run_ranks(train_unevenly, 3, cases)

    for index, case in enumerate(cases):
        losses = [step[0] for step in by_rank[0][index]]
        plain = [step[0] for step in train_plainly(case)]
        assert losses == pytest.approx(plain, abs=1e-5)
        assert losses[-1] < losses[0] - 0.5


@pytest.mark.slow
@pytest.mark.parametrize("tied", [False, True])
def test_collectives_do_not_depend_on_micro_batches_or_ranks(tied: bool):
    splits = [((4, 4), (4, 4)), ((4, 4), (1, 1)), ((7, 1), (1, 1)), ((8, 0), (2, 1))]
    cases = [
        Case(batches=batches, micros=micros, shares=(1, 3), tied=tied, steps=1)
        for batches, micros in splits
    ]

    by_rank = run_ranks(train_unevenly, 2, cases)

    calls = [results[index][0][3] for results in by_rank for index in range(len(cases))]
    # 3 blocks, the last of them gathered once; front and back, or one unit for both, used thrice.
    gathers = 2 * 3 - 1 + 3
    reduces = 3 + (1 if tied else 2)
    assert all(one == {"gather": gathers, "reduce": reduces, "sum": 2} for one in calls)
