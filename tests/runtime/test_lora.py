"""Adapters: gradients of plain training over uneven splits, and nothing held for what is frozen."""

import random
import sys
from itertools import pairwise
from pathlib import Path

import pytest

pytest.importorskip("torch")

import torch

sys.path.insert(0, str(Path(__file__).parent))
from command_cases import a_plan, events
from engine_cases import a_spec, tokens
from lora_cases import LoraCase, train_plainly, train_unevenly
from ranks import run_ranks

from drystone.describe.recipe import Lora, Tuning
from drystone.errors import InvalidSpec
from drystone.plan.plan import save_plan
from drystone.run.train.__main__ import main
from drystone.run.train.models.lora import add_adapters
from drystone.run.train.models.transformer import build_model
from drystone.run.train.uneven.engine import Engine

pytestmark = [pytest.mark.torch, pytest.mark.filterwarnings("default")]


def check_equal(case: LoraCase, ranks: list[list[tuple]]) -> None:
    """Adapters have the gradient of plain training; together the ranks hold each element once."""
    for step, (loss, norm, gradients) in enumerate(train_plainly(case)):
        found = {name: torch.full((one.numel(),), torch.nan) for name, one in gradients.items()}
        spans = {name: [] for name in gradients}
        for rank in ranks:
            assert rank[step][0] == pytest.approx(loss, abs=1e-5), case
            assert rank[step][1] == pytest.approx(norm, rel=1e-5), case
            for name, start, end, values in rank[step][2]:
                found[name][start:end] = values
                spans[name].append((start, end))
        for name, gradient in gradients.items():
            some = sorted(spans[name])
            assert [some[0][0], some[-1][1]] == [0, gradient.numel()]
            assert all(a[1] == b[0] for a, b in pairwise(some))
            assert (found[name] - gradient.flatten()).abs().max() <= 1e-6, (case, step, name)


def a_random_case(chance: random.Random, num_ranks: int) -> LoraCase:
    batches = [chance.choice((0, 1, 2, 3)) for _ in range(num_ranks)]
    batches[chance.randrange(num_ranks)] += 1
    shares = [chance.choice((0.0, 1.0, chance.random())) for _ in range(num_ranks)]
    shares[chance.randrange(num_ranks)] += 0.5
    targets = chance.sample(Lora.KNOWN_TARGETS, chance.randint(2, 7))
    return LoraCase(
        batches=tuple(batches),
        micros=tuple(chance.randint(1, 2) for _ in range(num_ranks)),
        shares=tuple(shares),
        style=chance.choice(("gpt", "llama", "gpt2-hf", "llama-hf")),
        tied=chance.random() < 0.5,
        clip=chance.choice((0.0, 0.05)),
        steps=3,
        targets=tuple({*targets, "q", "down"}),
        trains_embeddings=chance.random() < 0.3,
    )


@pytest.mark.slow
@pytest.mark.parametrize("num_ranks", [2, 3])
def test_random_uneven_splits_equal_a_single_device(num_ranks: int):
    pytest.importorskip("transformers")
    chance = random.Random(200 + num_ranks)
    cases = [a_random_case(chance, num_ranks) for _ in range(12)]

    by_rank = run_ranks(train_unevenly, num_ranks, cases)

    for index, case in enumerate(cases):
        check_equal(case, [results[index] for results in by_rank])


def test_one_process_is_plain_training():
    case = LoraCase(batches=(4,), micros=(2,), shares=(1.0,), style="llama", steps=3)

    check_equal(case, train_unevenly([case]))


def test_what_is_frozen_is_neither_reduced_nor_given_a_state_nor_changed():
    model = build_model(a_spec("llama", tied=False), seed=5, on_meta=True)
    names = add_adapters(model, Lora(rank=2, targets=("q", "v")))
    engine = Engine(model, [1.0], dtype=torch.bfloat16)
    before = {one.name: one.value.clone() for one in engine.owned}

    engine.compute_gradients([tokens().read(range(4))])

    assert len(names) == 6
    trained = {one.name for one in engine.owned if one.value.requires_grad}
    assert trained == {f"{name}.{end}" for name in names for end in ("lora_a", "lora_b")}
    groups = engine.parameter_groups()
    assert sum(len(group["params"]) for group in groups) == 12
    for one in engine.owned:
        assert (one.value.grad is not None) == (one.name in trained)
        assert torch.equal(one.value, before[one.name])
        assert one.value.dtype == (torch.float32 if one.name in trained else torch.bfloat16)
    # Embeddings and head are frozen: the front is not gathered again, only adapters are reduced.
    assert engine.wire.traffic.calls["reduce"] == 3
    assert engine.wire.traffic.calls["gather"] == 2 * (2 * 3 - 1) + 2


def test_a_plan_with_adapters_is_trained(tmp_path: Path, capsys):
    plan = a_plan([(4, 2, 1.0)], tuning=Tuning.LORA, lora=Lora(rank=4))
    save_plan(plan, tmp_path / "plan.json")

    saved = ["--checkpoints", str(tmp_path / "saved")]
    assert main([str(tmp_path / "plan.json"), "--steps", "12", "--lr", "0.02", *saved]) == 0
    assert main([str(tmp_path / "plan.json"), "--steps", "14", "--lr", "0.02", *saved]) == 0

    steps = [one for one in events(capsys.readouterr().out) if one["event"] == "step"]
    assert [one["step"] for one in steps] == list(range(1, 15))
    assert steps[-1]["loss"] < steps[0]["loss"] - 0.005


def test_no_place_for_adapters_is_an_error():
    model = build_model(a_spec("gpt", tied=False))

    with pytest.raises(InvalidSpec, match="no matrix for adapters at gate"):
        add_adapters(model, Lora(targets=("gate",)))
