"""The reference transformer: any decoder that a `ModelSpec` describes, as a torch module.

Queries, keys and values are projected apart, so that a later split by heads is a split by rows.
Positions are learned where the spec says so, rotary otherwise. What it does not do is refused by
name (`describe/trainable.py`): experts, latent attention, encoders, vision.
"""

from __future__ import annotations

import math
from collections.abc import Callable

import torch
from torch import nn
from torch.nn import functional as F  # noqa: N812  # torch's own custom

from drystone.describe.model import Attention, Block, Mlp, ModelSpec, Norm, QkNorm
from drystone.describe.trainable import refuse_untrainable
from drystone.run.train.models.layered import place_parameters, seeded_normal
from drystone.run.train.samples import inputs_of, num_predicted, targets_of

_RESIDUAL = ("out", "down")  # projections whose result is added to the residual stream
Rotary = tuple[torch.Tensor, torch.Tensor] | None

_ACTIVATIONS: dict[str, Callable[[torch.Tensor], torch.Tensor]] = {
    "gelu": F.gelu,
    "gelu_new": lambda x: F.gelu(x, approximate="tanh"),
    "gelu_pytorch_tanh": lambda x: F.gelu(x, approximate="tanh"),
    "gelu_fast": lambda x: F.gelu(x, approximate="tanh"),
    "relu": F.relu,
    "relu2": lambda x: F.relu(x).square(),
    "silu": F.silu,
}


def build_model(spec: ModelSpec, *, seed: int = 0, on_meta: bool = False) -> Transformer:
    """The model with fresh weights: the same for the same seed, and the global chance untouched.

    With `on_meta` it has no weights yet: each is made when `initial_value` is asked for it, the
    same as without, so that a rank need not hold more than its piece.
    """
    refuse_untrainable(spec)
    with torch.device("meta"):
        model = Transformer(spec, seed=seed)
    if not on_meta:
        place_parameters(model, lambda name, one: model.initial_value(name, one))
    return model


class Transformer(nn.Module):
    """A decoder; a batch is a tensor of samples (`run/train/samples.py`)."""

    def __init__(self, spec: ModelSpec, *, seed: int = 0) -> None:
        super().__init__()
        self.spec, self.seed = spec, seed
        width, eps = spec.hidden_size, spec.norm_eps
        self.tokens = nn.Embedding(spec.vocab_size, width)
        self.positions = (
            nn.Embedding(spec.learned_positions, width) if spec.learned_positions else None
        )
        self.first_norm = (
            make_norm(spec.final_norm, width, eps) if spec.has_embedding_norm else None
        )
        self.blocks = nn.ModuleList(DecoderBlock(block, width, eps) for block in spec.layers())
        self.final_norm = make_norm(spec.final_norm, width, eps) if spec.num_final_norms else None
        self.head = nn.Linear(width, spec.vocab_size, bias=spec.head_bias)
        if spec.tied_embeddings:
            self.head.weight = self.tokens.weight

    @property
    def module(self) -> nn.Module:
        """Itself: `LayeredModel` asks."""
        return self

    @property
    def front(self) -> list[nn.Parameter]:
        """Embeddings."""
        return _parameters(self.tokens, self.positions, self.first_norm)

    @property
    def back(self) -> list[nn.Parameter]:
        """Last norm and head."""
        return _parameters(self.final_norm, self.head)

    def initial_value(self, name: str, parameter: nn.Parameter) -> torch.Tensor:
        """The weight of that name before training. It depends on seed and name alone.

        Normal, with 0.02 unless the spec has another; what adds to the residual stream
        by less, the deeper the model is (GPT-2); norms are 1, biases 0.
        """
        path, _, kind = name.rpartition(".")
        if kind in ("bias", "lora_b"):
            return torch.zeros(parameter.shape)
        if kind == "lora_a":
            std = parameter.shape[1] ** -0.5
        elif path.rpartition(".")[2] in _RESIDUAL:
            std = self.spec.initial_std / math.sqrt(2 * self.spec.num_layers)
        elif isinstance(self.get_submodule(path), nn.Linear | nn.Embedding):
            std = self.spec.initial_std
        else:
            return torch.ones(parameter.shape)
        return seeded_normal(parameter.shape, std, self.seed, name)

    def embed(self, batch: torch.Tensor) -> tuple[torch.Tensor, Rotary]:
        """Embedded tokens, and the rotary table where positions are not learned."""
        inputs = inputs_of(batch)
        x = self.tokens(inputs)
        rotary = None
        if self.positions is None:
            rotary = rotary_table(self.spec, inputs.shape[1], x)
        else:
            x = x + self.positions(torch.arange(inputs.shape[1], device=x.device))
        return (x if self.first_norm is None else self.first_norm(x)), rotary

    def run_block(self, index: int, hidden: torch.Tensor, extras: Rotary) -> torch.Tensor:
        """One layer."""
        return self.blocks[index](hidden, extras)

    def loss_sum(self, hidden: torch.Tensor, batch: torch.Tensor) -> torch.Tensor:
        """Cross-entropy summed over tokens, in fp32."""
        x = hidden if self.final_norm is None else self.final_norm(hidden)
        logits = self.head(x).flatten(0, 1).float()
        return F.cross_entropy(logits, targets_of(batch).flatten(), reduction="sum")

    def weight(self, batch: torch.Tensor) -> float:
        """Tokens that are predicted."""
        return float(num_predicted(batch))

    def forward(self, batch: torch.Tensor) -> torch.Tensor:
        """The mean loss: plain training, without the engine."""
        x, rotary = self.embed(batch)
        for block in self.blocks:
            x = block(x, rotary)
        return self.loss_sum(x, batch) / self.weight(batch)


class DecoderBlock(nn.Module):
    """Attention and feed-forward, each normalised before, with 4 norms also after."""

    def __init__(self, spec: Block, width: int, eps: float) -> None:
        super().__init__()
        assert isinstance(spec.feed_forward, Mlp)
        self.is_parallel = spec.parallel_residual
        self.attention = SelfAttention(spec.attention, width, spec.norm, eps)
        self.feed_forward = FeedForward(spec.feed_forward, width)
        self.norms = nn.ModuleList(make_norm(spec.norm, width, eps) for _ in range(spec.num_norms))

    def forward(self, x: torch.Tensor, rotary: Rotary) -> torch.Tensor:
        """Hidden states in, the same out."""
        if self.is_parallel:
            return x + self.attention(self.norms[0](x), rotary) + self._feed(self.norms[-1](x))
        attended = self.attention(self.norms[0](x), rotary)
        x = x + (self.norms[2](attended) if len(self.norms) == 4 else attended)
        fed = self._feed(self.norms[1](x))
        return x + (self.norms[3](fed) if len(self.norms) == 4 else fed)

    def _feed(self, x: torch.Tensor) -> torch.Tensor:
        return self.feed_forward(x)


class SelfAttention(nn.Module):
    """Causal attention in which several query heads may share one head of keys and values."""

    def __init__(self, spec: Attention, width: int, norm: Norm, eps: float) -> None:
        super().__init__()
        self.spec = spec
        bias = spec.qkv_bias
        self.query = nn.Linear(width, spec.num_heads * spec.head_dim, bias=bias)
        self.key = nn.Linear(width, spec.num_kv_heads * spec.head_dim, bias=bias)
        self.value = nn.Linear(width, spec.num_kv_heads * spec.v_dim, bias=bias)
        self.out = nn.Linear(spec.num_heads * spec.v_dim, width, bias=spec.out_bias)
        self.query_norm = self.key_norm = None
        if spec.qk_norm is QkNorm.HEAD:
            self.query_norm, self.key_norm = (make_norm(norm, spec.head_dim, eps) for _ in range(2))
        elif spec.qk_norm is QkNorm.FULL:
            self.query_norm = make_norm(norm, self.query.out_features, eps)
            self.key_norm = make_norm(norm, self.key.out_features, eps)

    def forward(self, x: torch.Tensor, rotary: Rotary) -> torch.Tensor:
        """Each position looks at itself and at what came before."""
        spec = self.spec
        q = self._heads(self.query(x), self.query_norm)
        k = self._heads(self.key(x), self.key_norm)
        v = self.value(x).unflatten(-1, (-1, spec.v_dim)).transpose(1, 2)
        if rotary is not None:
            q, k = rotate(q, rotary), rotate(k, rotary)
        repeats = spec.num_heads // spec.num_kv_heads
        if repeats > 1:
            k, v = k.repeat_interleave(repeats, dim=1), v.repeat_interleave(repeats, dim=1)
        mask = self._window(x.shape[1], x.device)
        y = F.scaled_dot_product_attention(q, k, v, attn_mask=mask, is_causal=mask is None)
        return self.out(y.transpose(1, 2).flatten(2))

    def _heads(self, x: torch.Tensor, norm: nn.Module | None) -> torch.Tensor:
        is_full = self.spec.qk_norm is QkNorm.FULL
        x = norm(x) if norm is not None and is_full else x
        x = x.unflatten(-1, (-1, self.spec.head_dim))
        x = norm(x) if norm is not None and not is_full else x
        return x.transpose(1, 2)

    def _window(self, length: int, device: torch.device) -> torch.Tensor | None:
        """Which positions are seen, where that is not simply all before."""
        if not 0 < self.spec.window < length:
            return None
        at = torch.arange(length, device=device)
        distance = at[:, None] - at[None, :]
        return (distance >= 0) & (distance < self.spec.window)


class FeedForward(nn.Module):
    """Up, activation (gated or not), down."""

    def __init__(self, spec: Mlp, width: int) -> None:
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


def make_norm(norm: Norm, width: int, eps: float) -> nn.Module:
    """One normalisation over the last dimension."""
    eps = eps or default_eps(norm)
    if norm is Norm.RMS:
        return nn.RMSNorm(width, eps=eps)
    return nn.LayerNorm(
        width, eps=eps, elementwise_affine=norm is not Norm.NO_WEIGHT, bias=norm is Norm.LAYER
    )


def default_eps(norm: Norm) -> float:
    """What norms add to a variance where the spec does not say."""
    return 1e-6 if norm is Norm.RMS else 1e-5


def rotary_table(spec: ModelSpec, length: int, like: torch.Tensor) -> tuple[torch.Tensor, ...]:
    """Cosines and sines of every position's angles (arXiv:2104.09864), in the dtype of `like`."""
    head_dim = spec.blocks[0].attention.head_dim
    steps = torch.arange(0, head_dim, 2, dtype=torch.float32, device=like.device) / head_dim
    at = torch.arange(length, dtype=torch.float32, device=like.device)
    angles = torch.outer(at, spec.rope_theta**-steps).repeat(1, 2)
    return angles.cos().to(like.dtype), angles.sin().to(like.dtype)


def rotate(x: torch.Tensor, rotary: tuple[torch.Tensor, ...]) -> torch.Tensor:
    """Turn the two halves of each head against each other."""
    cosine, sine = rotary
    first, second = x.chunk(2, dim=-1)
    return x * cosine + torch.cat((-second, first), dim=-1) * sine


def _parameters(*modules: nn.Module | None) -> list[nn.Parameter]:
    return [
        parameter for module in modules if module is not None for parameter in module.parameters()
    ]
