"""What the ranks of the engine's tests do, and the plain training that they must equal."""

from dataclasses import dataclass
from itertools import pairwise

import torch
from torch import nn
from torch.nn import functional as F  # noqa: N812

from drystone.describe.model import Attention, Block, Mlp, ModelSpec, Norm
from drystone.describe.recipe import Recompute
from drystone.run.train.data import RankWork, SyntheticTokens, micro_batches
from drystone.run.train.models.layered import NamedBlocks
from drystone.run.train.models.transformer import build_model
from drystone.run.train.stepping import Stepper
from drystone.run.train.uneven.engine import Engine
from drystone.run.train.uneven.whole import WholeEngine

VOCAB, SEQ_LEN, WIDTH = 61, 12, 16


@dataclass(frozen=True)
class Case:
    """One split of one job."""

    batches: tuple[int, ...]
    micros: tuple[int, ...]
    shares: tuple[float, ...]
    style: str = "gpt"
    tied: bool = False
    clip: float = 0.0
    steps: int = 2
    num_layers: int = 3
    held: str = "layers"  # at a time; or "all" weights, or "replicated": the state too
    recompute: str = "full"

    @property
    def works(self) -> list[RankWork]:
        return [
            RankWork(batch=b, micro_batch=m, state_share=r)
            for b, m, r in zip(self.batches, self.micros, self.shares, strict=True)
        ]


def a_spec(style: str, *, tied: bool, num_layers: int = 3) -> ModelSpec:
    if style == "llama":
        attention = Attention(num_heads=4, num_kv_heads=2, head_dim=4)
        block = Block(
            attention=attention,
            feed_forward=Mlp(ffn_size=24, gated=True, activation="silu"),
        )
        return ModelSpec(
            name="small-llama", hidden_size=WIDTH, stack=((block, num_layers),), vocab_size=VOCAB,
            tied_embeddings=tied,
        )  # fmt: skip
    attention = Attention(num_heads=2, num_kv_heads=2, head_dim=8, qkv_bias=True, out_bias=True)
    block = Block(
        attention=attention,
        feed_forward=Mlp(ffn_size=32, gated=False, bias=True),
        norm=Norm.LAYER,
    )
    return ModelSpec(
        name="small-gpt", hidden_size=WIDTH, stack=((block, num_layers),), vocab_size=VOCAB,
        tied_embeddings=tied, learned_positions=SEQ_LEN, final_norm=Norm.LAYER,
    )  # fmt: skip


class UserModel(nn.Module):
    """A module that knows nothing of the engine; its head shares the embedding."""

    def __init__(self) -> None:
        super().__init__()
        self.letters = nn.Embedding(VOCAB, WIDTH)
        self.trunk = nn.Module()
        self.trunk.layers = nn.ModuleList(UserBlock() for _ in range(3))
        self.norm = nn.LayerNorm(WIDTH)

    def forward(self, tokens: torch.Tensor) -> torch.Tensor:
        x = self.letters(tokens[:, :-1])
        scale = torch.linspace(0.5, 1.0, x.shape[1])[:, None]
        for layer in self.trunk.layers:
            x = layer(x, scale=scale)[0]
        logits = F.linear(self.norm(x), self.letters.weight)
        return F.cross_entropy(logits.flatten(0, 1), tokens[:, 1:].flatten())


class UserBlock(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.inner = nn.Linear(WIDTH, WIDTH)

    def forward(self, x: torch.Tensor, *, scale: torch.Tensor) -> tuple[torch.Tensor, None]:
        past = x.cumsum(1) / torch.arange(1, x.shape[1] + 1)[:, None]
        out = x + scale * torch.tanh(self.inner(past))
        return out, None


def a_model(case: Case):
    if case.style == "user":
        torch.manual_seed(5)
        return UserModel()
    return build_model(a_spec(case.style, tied=case.tied, num_layers=case.num_layers), seed=5)


def tokens() -> SyntheticTokens:
    return SyntheticTokens(seq_len=SEQ_LEN, vocab_size=VOCAB, seed=3)


def an_optimizer(groups) -> torch.optim.Optimizer:
    return torch.optim.AdamW(groups, lr=3e-3, eps=1e-6)


def train_plainly(case: Case) -> list[tuple[float, float, dict[str, torch.Tensor]]]:
    """Loss, gradient norm and gradients (before clipping) of every step, on one device."""
    model = a_model(case)
    matrices = [p for p in model.parameters() if p.dim() > 1]
    vectors = [p for p in model.parameters() if p.dim() <= 1]
    optimizer = an_optimizer([{"params": matrices, "weight_decay": 0.1},
                              {"params": vectors, "weight_decay": 0.0}])  # fmt: skip
    results, batch = [], sum(case.batches)
    for step in range(case.steps):
        loss = model(tokens().read(range(step * batch, (step + 1) * batch)))
        loss.backward()
        gradients = {name: p.grad.clone() for name, p in model.named_parameters()}
        most = case.clip or float("inf")
        norm = nn.utils.clip_grad_norm_(model.parameters(), most)
        results.append((loss.item(), norm.item(), gradients))
        optimizer.step()
        optimizer.zero_grad()
    return results


def an_engine(case: Case) -> Stepper:
    model = a_model(case)
    layered = NamedBlocks(model, "trunk.layers") if case.style == "user" else model
    if case.held == "layers":
        return Engine(layered, case.shares)
    return WholeEngine(
        layered,
        case.shares,
        is_replicated=case.held == "replicated",
        recompute=Recompute.parse(case.recompute),
    )


def train_unevenly(cases: list[Case]) -> list[list[tuple]]:
    """For each case and step: loss, norm, owned gradients as (name, start, end, values), calls."""
    return [_train_one(case) for case in cases]


def _train_one(case: Case) -> list[tuple]:
    engine = an_engine(case)
    optimizer = an_optimizer(engine.parameter_groups(weight_decay=0.1))
    source, works, results = tokens(), case.works, []
    for step in range(case.steps):
        position = step * sum(case.batches)
        engine.wire.traffic.calls.clear()
        runs = micro_batches(works, engine.wire.rank, position)
        result = engine.compute_gradients([source.read(run) for run in runs])
        owned = [(o.name, o.start, o.end, o.value.grad.clone()) for o in engine.counted]
        if case.clip:
            engine.clip_gradients(result, case.clip)
        optimizer.step()
        optimizer.zero_grad()
        calls = dict(engine.wire.traffic.calls)
        results.append((result.loss, result.gradient_norm, owned, calls))
    return results


def whole_gradients(ranks: list[list[tuple]], step: int, like: dict[str, torch.Tensor]):
    """Put the pieces of all ranks together; every element must be held exactly once."""
    found = {name: torch.full((g.numel(),), torch.nan) for name, g in like.items()}
    spans = {name: [] for name in like}
    for rank in ranks:
        for name, start, end, values in rank[step][2]:
            found[name][start:end] = values
            spans[name].append((start, end))
    for name, gradient in like.items():
        ordered = sorted(spans[name])
        assert ordered[0][0] == 0
        assert ordered[-1][1] == gradient.numel()
        assert all(a[1] == b[0] for a, b in pairwise(ordered))
    return {name: values.view(like[name].shape) for name, values in found.items()}
