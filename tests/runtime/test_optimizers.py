"""Optimizers over the engine's pieces against the same optimizers over a plain model."""

import sys
from pathlib import Path

import pytest

pytest.importorskip("torch")

import torch

sys.path.insert(0, str(Path(__file__).parent))
from engine_cases import Case, a_model, tokens

from drystone.describe.model_source import find_model
from drystone.describe.pool import parse_pool
from drystone.describe.recipe import Optimizer, Precision, Recipe
from drystone.errors import InvalidSpec
from drystone.plan.plan import Plan
from drystone.plan.search import plan_executable
from drystone.run.train.config import RankConfig
from drystone.run.train.optimizers import AdamW8bit, choose_optimizer, dynamic_codes
from drystone.run.train.uneven.shard import Owned
from drystone.run.train.uneven.whole import WholeEngine

pytestmark = [pytest.mark.torch, pytest.mark.filterwarnings("default")]

CASE = Case(batches=(4,), micros=(4,), shares=(1.0,), style="llama")
CONFIG = RankConfig(learning_rate=1e-2, weight_decay=0.1, epsilon=1e-6)
ADAM = {"lr": 1e-2, "betas": (CONFIG.beta1, CONFIG.beta2), "eps": 1e-6}


def plain_optimizers(model, kind: Optimizer) -> list[torch.optim.Optimizer]:
    """As one would write it with torch alone: matrices decay, vectors do not."""
    named = dict(model.named_parameters())
    matrices = [p for p in named.values() if p.dim() > 1]
    vectors = [p for p in named.values() if p.dim() <= 1]
    both = [{"params": matrices, "weight_decay": 0.1}, {"params": vectors, "weight_decay": 0.0}]
    match kind:
        case Optimizer.SGD:
            return [torch.optim.SGD(both, lr=1e-2)]
        case Optimizer.SGD_MOMENTUM:
            return [torch.optim.SGD(both, lr=1e-2, momentum=0.9)]
        case Optimizer.ADAFACTOR:
            return [torch.optim.Adafactor(both, lr=1e-2)]
        case Optimizer.MUON:
            hidden = [p for name, p in named.items() if p.dim() == 2 and "blocks." in name]
            tables = [p for name, p in named.items() if p.dim() == 2 and "blocks." not in name]
            rest = [{"params": tables, "weight_decay": 0.1}, both[1]]
            how = {"lr": 1e-2, "adjust_lr_fn": "match_rms_adamw", "weight_decay": 0.1}
            return [torch.optim.Muon(hidden, **how), torch.optim.AdamW(rest, **ADAM)]
    return [torch.optim.AdamW(both, **ADAM)]


def train_plainly(kind: Optimizer, steps: int) -> dict[str, torch.Tensor]:
    model = a_model(CASE)
    optimizers = plain_optimizers(model, kind)
    for step in range(steps):
        model(tokens().read(range(4 * step, 4 * step + 4))).backward()
        for optimizer in optimizers:
            optimizer.step()
            optimizer.zero_grad()
    return {name: p.detach() for name, p in model.named_parameters()}


def train(kind: Optimizer, steps: int) -> WholeEngine:
    engine = WholeEngine(a_model(CASE), [1.0])
    optimizer = choose_optimizer(kind, CONFIG)(engine.parameter_groups(weight_decay=0.1))
    for step in range(steps):
        engine.compute_gradients([tokens().read(range(4 * step, 4 * step + 4))])
        optimizer.step()
        optimizer.zero_grad(set_to_none=True)
    return engine


@pytest.mark.parametrize(
    "kind",
    [Optimizer.ADAM, Optimizer.SGD, Optimizer.SGD_MOMENTUM, Optimizer.ADAFACTOR, Optimizer.MUON],
)
def test_as_torch_has_it(kind: Optimizer):
    expected = train_plainly(kind, 4)

    for owned in train(kind, 4).owned:
        found = owned.value.detach().view(owned.shape)
        torch.testing.assert_close(found, expected[owned.name], atol=2e-5, rtol=1e-4)


def test_adafactor_is_that_of_transformers_but_for_its_last_step_lengths():
    """Torch's own is compared above; what the two agree on is the factored second moment."""
    transformers = pytest.importorskip("transformers")
    torch.manual_seed(0)
    weight, gradient = torch.randn(6, 4), torch.randn(6, 4)
    ours, theirs = (torch.nn.Parameter(weight.clone()) for _ in range(2))
    ours.grad, theirs.grad = gradient.clone(), gradient.clone()
    torch.optim.Adafactor([ours], lr=1e-2, eps=(1e-30, 1e-3), weight_decay=0.0).step()
    other = transformers.Adafactor(
        [theirs], lr=1e-2, scale_parameter=True, relative_step=False, warmup_init=False
    )
    other.step()

    torch.testing.assert_close(ours, theirs, atol=1e-4, rtol=1e-3)


def test_lion_is_its_paper():
    value = torch.nn.Parameter(torch.tensor([1.0, -2.0, 3.0]))
    group = {"params": [value], "weight_decay": 0.5}
    optimizer = choose_optimizer(Optimizer.LION, RankConfig(learning_rate=0.1, beta2=0.99))([group])
    mean, expected = torch.zeros(3), value.detach().clone()
    for gradient in (torch.tensor([0.3, -1.0, 0.0]), torch.tensor([-5.0, 0.1, 2.0])):
        value.grad = gradient
        optimizer.step()
        expected = expected * (1 - 0.1 * 0.5)
        expected = expected - 0.1 * torch.sign(0.9 * mean + 0.1 * gradient)
        mean = 0.99 * mean + 0.01 * gradient

    torch.testing.assert_close(value.detach(), expected)


def test_eight_bit_states_are_a_byte_and_lead_where_adam_leads():
    exact = train_plainly(Optimizer.ADAM, 8)
    engine = train(Optimizer.ADAM_8BIT, 8)
    start = dict(a_model(CASE).named_parameters())

    for owned in engine.owned:
        moved = (exact[owned.name] - start[owned.name].detach()).flatten()
        ours = owned.value.detach() - start[owned.name].detach().flatten()
        assert torch.nn.functional.cosine_similarity(moved, ours, dim=0) > 0.98, owned.name


def test_eight_bit_states_take_the_estimated_bytes():
    value = torch.nn.Parameter(torch.randn(2560))
    value.grad = torch.randn(2560)
    optimizer = AdamW8bit([{"params": [value]}], lr=1e-3, betas=(0.9, 0.999), eps=1e-8)
    optimizer.step()

    state = optimizer.state[value]
    held = sum(state[name].nbytes for name in state if name != "step")
    assert held == 2 * 2560 * (1 + 4 / 256)
    for is_signed in (True, False):
        codes = dynamic_codes(is_signed=is_signed)
        assert len(codes.unique()) == 256
        assert codes[-1] == 1.0


@pytest.mark.parametrize("kind", [Optimizer.ADAFACTOR, Optimizer.MUON, Optimizer.ADAM_8BIT])
def test_what_needs_whole_matrices_is_planned_so_and_refuses_pieces(kind: Optimizer):
    recipe = Recipe(seq_len=512, global_batch=16, precision=Precision.BF16_MIXED, optimizer=kind)
    plan = plan_executable(find_model("gpt2"), recipe, parse_pool("2xA100-80G"))
    piece = Owned("w", torch.Size([4, 4]), 0, 8, torch.nn.Parameter(torch.zeros(8)))

    assert isinstance(plan, Plan)
    assert plan.sharding == 0
    assert plan.stages[0].tp == len(plan.stages) == 1
    with pytest.raises(InvalidSpec, match="whole matrices"):
        choose_optimizer(kind, CONFIG)([{"params": [piece.value], "owned": [piece]}])


def test_lamb_is_refused():
    with pytest.raises(InvalidSpec, match="lamb"):
        choose_optimizer(Optimizer.LAMB, CONFIG)([])
