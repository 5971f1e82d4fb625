"""The second half of a block: one feed-forward network, or a mixture of them (experts)."""

from __future__ import annotations

from collections.abc import Callable

import torch
from torch import nn
from torch.nn import functional as F  # noqa: N812  # torch's own custom

from drystone.describe.model import Experts, Mlp

_ACTIVATIONS: dict[str, Callable[[torch.Tensor], torch.Tensor]] = {
    "gelu": F.gelu,
    "gelu_new": lambda x: F.gelu(x, approximate="tanh"),
    "gelu_pytorch_tanh": lambda x: F.gelu(x, approximate="tanh"),
    "gelu_fast": lambda x: F.gelu(x, approximate="tanh"),
    "relu": F.relu,
    "relu2": lambda x: F.relu(x).square(),
    "silu": F.silu,
}


def make_feed_forward(spec: Mlp | Experts, width: int) -> nn.Module:
    """Whichever of both a block has."""
    return FeedForward(spec, width) if isinstance(spec, Mlp) else ExpertMixture(spec, width)


class FeedForward(nn.Module):
    """Up, activation (gated or not), down."""

    def __init__(self, spec: Mlp | Experts, width: int) -> None:
        super().__init__()
        self.up = nn.Linear(width, spec.ffn_size, bias=spec.bias)
        self.gate = nn.Linear(width, spec.ffn_size, bias=spec.bias) if spec.gated else None
        self.down = nn.Linear(spec.ffn_size, width, bias=spec.bias)
        self.activate = _ACTIVATIONS[spec.activation]

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        """Position by position."""
        if self.gate is None:
            return self.down(self.activate(self.up(x)))
        return self.down(self.activate(self.gate(x)) * self.up(x))


class ExpertMixture(nn.Module):
    """Each token passes the `top_k` networks that the router finds likeliest for it.

    All experts stand on this device. Tokens are sorted by expert, so each expert is one call, also
    where no token came: its gradient is then zero, as in one module that holds all of them.
    """

    def __init__(self, spec: Experts, width: int) -> None:
        super().__init__()
        self.spec = spec
        self.router = nn.Linear(width, spec.num_experts, bias=False)
        self.experts = nn.ModuleList(FeedForward(spec, width) for _ in range(spec.num_experts))

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        """Position by position."""
        tokens, top_k = x.flatten(0, -2), self.spec.top_k
        share, expert = self.router(tokens).softmax(-1, dtype=torch.float32).topk(top_k)
        if self.spec.normalises_shares:
            share = share / share.sum(-1, keepdim=True)
        order = expert.flatten().argsort(stable=True)
        counts = expert.flatten().bincount(minlength=self.spec.num_experts).tolist()
        runs = tokens[order // top_k].split(counts)
        found = torch.cat([own(run) for own, run in zip(self.experts, runs, strict=True)])
        found = found[order.argsort()].unflatten(0, (-1, top_k))  # back to the order of tokens
        mixed = (found * share.to(x.dtype).unsqueeze(-1)).sum(1)
        return mixed.unflatten(0, x.shape[:-1])
