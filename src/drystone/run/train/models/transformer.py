"""The reference transformer: any decoder that a `ModelSpec` describes, as a torch module.

Queries, keys and values are projected apart, so that a later split by heads is a split by rows.
Positions are learned where the spec says so, rotary otherwise. One block does what all families do,
by switches of the spec (`describe/families/function.py`). What it does not do is refused by name
(`describe/trainable.py`): latent attention, encoders, vision.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Sequence

import torch
from torch import nn
from torch.nn import functional as F  # noqa: N812  # torch's own custom

from drystone.describe.model import Attention, Block, ModelSpec, Norm, QkNorm
from drystone.describe.trainable import refuse_untrainable
from drystone.run.train.checkpoint.slices import Box
from drystone.run.train.models.feed_forward import make_feed_forward
from drystone.run.train.models.layered import place_parameters, seeded_normal
from drystone.run.train.models.pretrained import PretrainedWeights
from drystone.run.train.models.quantised import BLOCK, BLOCK_BYTES, PACKED, QuantisedLinear, pack
from drystone.run.train.models.rotary import Rotary, rotary_tables, rotate
from drystone.run.train.samples import (
    Places,
    document_starts,
    documents_of,
    inputs_of,
    num_predicted,
    same_document,
    targets_of,
)

_RESIDUAL = ("out", "down")  # projections whose result is added to the residual stream


def build_model(spec: ModelSpec, *, seed: int = 0, on_meta: bool = False) -> Transformer:
    """The model with the weights that its spec names, or fresh ones.

    Fresh ones are the same for the same seed, and the global chance is untouched. With `on_meta` it
    has no weights yet: they are read or made when `initial_part` is asked for them, the same as
    without, so that a rank need not hold more than its piece.
    """
    refuse_untrainable(spec)
    with torch.device("meta"):
        model = Transformer(spec, seed=seed)
    if spec.weights:
        model.pretrained = PretrainedWeights(spec)
    if not on_meta:
        place_parameters(model, lambda name, one: model.initial_value(name, one))
    return model


class Transformer(nn.Module):
    """A decoder; a batch is a tensor of samples (`run/train/samples.py`)."""

    def __init__(self, spec: ModelSpec, *, seed: int = 0) -> None:
        super().__init__()
        self.spec, self.seed = spec, seed
        self.calls: Sequence[Callable[..., torch.Tensor]] = ()  # the blocks compiled, if they are
        self.is_packed = False  # whether rows hold several documents, which do not see each other
        self.pretrained: PretrainedWeights | None = None
        width = spec.hidden_size
        padding = spec.padding_token if spec.padding_token >= 0 else None
        self.tokens = nn.Embedding(spec.vocab_size, width, padding_idx=padding)
        self.positions = (
            nn.Embedding(spec.learned_positions, width) if spec.learned_positions else None
        )
        self.first_norm = _outer_norm(spec) if spec.has_embedding_norm else None
        self.blocks = nn.ModuleList(DecoderBlock(block, spec) for block in spec.layers())
        self.final_norm = _outer_norm(spec) if spec.num_final_norms else None
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
        """The weight of that name before training."""
        return self.initial_part(name, parameter.shape, 0, parameter.numel()).view(parameter.shape)

    def initial_part(
        self, name: str, shape: torch.Size, first: int, last: int, part: Box | None = None
    ) -> torch.Tensor:
        """The elements `[first, last)`, row by row, of a part of a weight before training.

        Of weights that were trained before, no more is read than that.
        """
        if first >= last:
            return torch.empty(0)
        if name.endswith(f".{PACKED}"):
            return self._packed_part(name, first, last)
        part = part or Box((0,) * len(shape), tuple(shape), 0)
        if self.pretrained is not None and self.pretrained.has(name):
            return self.pretrained.read(name, part, first, last)
        whole = self._fresh_value(name, shape)
        at = tuple(
            slice(start, start + length)
            for start, length in zip(part.offsets, part.lengths, strict=True)
        )
        return whole[at].reshape(-1)[first:last]

    def _packed_part(self, name: str, first: int, last: int) -> torch.Tensor:
        """Bytes of a matrix in four bits: the blocks that they belong to are read and packed."""
        path = name.removesuffix(f".{PACKED}")
        module = self.get_submodule(path)
        assert isinstance(module, QuantisedLinear)
        shape = torch.Size((module.out_features, module.in_features))
        begin, end = first // BLOCK_BYTES, -(-last // BLOCK_BYTES)
        values = self.initial_part(
            f"{path}.weight", shape, begin * BLOCK, min(end * BLOCK, shape.numel())
        )
        return pack(values).view(-1)[first - begin * BLOCK_BYTES : last - begin * BLOCK_BYTES]

    def _fresh_value(self, name: str, shape: torch.Size) -> torch.Tensor:
        """A new weight. It depends on seed and name alone.

        Normal, with 0.02 unless the spec has another; what adds to the residual stream
        by less, the deeper the model is (GPT-2); norms are 1, biases 0.
        """
        path, _, kind = name.rpartition(".")
        if kind in ("bias", "lora_b"):
            return torch.zeros(shape)
        if kind == "lora_a":
            std = shape[1] ** -0.5
        elif path.rpartition(".")[2] in _RESIDUAL:
            std = self.spec.initial_std / math.sqrt(2 * self.spec.num_layers)
        elif isinstance(self.get_submodule(path), nn.Linear | nn.Embedding):
            std = self.spec.initial_std
        else:
            return torch.zeros(shape) if self.spec.norm_adds_one else torch.ones(shape)
        return seeded_normal(shape, std, self.seed, name)

    def embed(self, batch: torch.Tensor) -> tuple[torch.Tensor, Places]:
        """Embedded tokens, and where they are: what the blocks need to know besides."""
        inputs = inputs_of(batch)
        x = self.tokens(inputs)
        if self.spec.embedding_scale != 1.0:  # rounded as the embedding is
            x = x * x.new_full((), self.spec.embedding_scale)
        rotary: Rotary = {}
        if self.positions is None:
            rotary = rotary_tables(self.spec, inputs.shape[1], x)
        else:
            x = x + self.positions(self._positions_of(batch))
        documents = documents_of(batch) if self.is_packed else None
        return (x if self.first_norm is None else self.first_norm(x)), Places(rotary, documents)

    def _positions_of(self, batch: torch.Tensor) -> torch.Tensor:
        """Counted from the beginning of each document."""
        at = torch.arange(batch.shape[1] - 1, device=batch.device)
        return at - document_starts(documents_of(batch)) if self.is_packed else at

    def run_block(self, index: int, hidden: torch.Tensor, extras: Places) -> torch.Tensor:
        """One layer."""
        left: torch.Tensor = (self.calls or self.blocks)[index](hidden, extras)
        return left

    def loss_sum(self, hidden: torch.Tensor, batch: torch.Tensor) -> torch.Tensor:
        """Cross-entropy summed over tokens, in fp32."""
        logits = self.logits(hidden).flatten(0, 1).float()
        return F.cross_entropy(logits, targets_of(batch).flatten(), reduction="sum")

    def logits(self, hidden: torch.Tensor) -> torch.Tensor:
        """Of every token of the vocabulary, from what left the last block."""
        x = hidden if self.final_norm is None else self.final_norm(hidden)
        logits: torch.Tensor = self.head(x)
        if self.spec.logit_scale != 1.0:
            logits = logits * self.spec.logit_scale
        cap = self.spec.logit_softcap
        return torch.tanh(logits / cap) * cap if cap else logits

    def weight(self, batch: torch.Tensor) -> torch.Tensor:
        """Tokens that are predicted."""
        return num_predicted(batch)

    def forward(self, batch: torch.Tensor) -> torch.Tensor:
        """The mean loss: plain training, without the engine."""
        x, places = self.embed(batch)
        for block in self.blocks:
            x = block(x, places)
        return self.loss_sum(x, batch) / self.weight(batch)


class DecoderBlock(nn.Module):
    """Attention and feed-forward, each normalised before, after (OLMo 2), or both (Gemma 2)."""

    def __init__(self, spec: Block, model: ModelSpec) -> None:
        super().__init__()
        width = model.hidden_size
        self.is_parallel, self.norms_after = spec.parallel_residual, spec.norms_after
        self.residual_scale = model.residual_scale
        self.attention = SelfAttention(spec.attention, spec.norm, model)
        self.feed_forward = make_feed_forward(spec.feed_forward, width)
        self.norms = nn.ModuleList(
            make_norm(spec.norm, width, model) for _ in range(spec.num_norms)
        )

    def forward(self, x: torch.Tensor, places: Places) -> torch.Tensor:
        """Hidden states in, the same out."""
        norms = self.norms
        if self.is_parallel:
            return x + self.attention(norms[0](x), places) + self.feed_forward(norms[-1](x))
        if self.norms_after:
            x = x + norms[0](self.attention(x, places))
            return x + norms[1](self.feed_forward(x))
        x = self._added(x, self.attention(norms[0](x), places), 2)
        return self._added(x, self.feed_forward(norms[1](x)), 3)

    def _added(self, x: torch.Tensor, change: torch.Tensor, norm: int) -> torch.Tensor:
        if len(self.norms) == 4:
            change = self.norms[norm](change)
        return x + (change if self.residual_scale == 1.0 else change * self.residual_scale)


class SelfAttention(nn.Module):
    """Causal attention in which several query heads may share one head of keys and values."""

    def __init__(self, spec: Attention, norm: Norm, model: ModelSpec) -> None:
        super().__init__()
        self.spec, width = spec, model.hidden_size
        bias = spec.qkv_bias
        self.query = nn.Linear(width, spec.num_heads * spec.head_dim, bias=bias)
        self.key = nn.Linear(width, spec.num_kv_heads * spec.head_dim, bias=bias)
        self.value = nn.Linear(width, spec.num_kv_heads * spec.v_dim, bias=bias)
        self.out = nn.Linear(spec.num_heads * spec.v_dim, width, bias=spec.out_bias)
        self.query_norm = self.key_norm = None
        if spec.qk_norm is QkNorm.HEAD:
            self.query_norm, self.key_norm = (
                make_norm(norm, spec.head_dim, model) for _ in range(2)
            )
        elif spec.qk_norm is QkNorm.FULL:
            self.query_norm = make_norm(norm, self.query.out_features, model)
            self.key_norm = make_norm(norm, self.key.out_features, model)

    def forward(self, x: torch.Tensor, places: Places) -> torch.Tensor:
        """Each position looks at itself and at what came before."""
        spec = self.spec
        q = self._heads(self.query(x), self.query_norm)
        k = self._heads(self.key(x), self.key_norm)
        v = self.value(x).unflatten(-1, (-1, spec.v_dim)).transpose(1, 2)
        if places.rotary:
            table = places.rotary[spec.rope_theta]
            q, k = rotate(q, table), rotate(k, table)
        y = self._attend(q, k, v, places.documents)
        return self.out(y.transpose(1, 2).flatten(2))

    def _attend(
        self,
        q: torch.Tensor,
        k: torch.Tensor,
        v: torch.Tensor,
        documents: torch.Tensor | None = None,
    ) -> torch.Tensor:
        spec, length = self.spec, q.shape[2]
        mask = self._window(length, q.device)
        if documents is not None:
            mask = same_document(documents, mask)
        repeats = spec.num_heads // spec.num_kv_heads
        if repeats > 1:
            if mask is None and not spec.softcap and takes_groups(q, k, v):
                return F.scaled_dot_product_attention(
                    q, k, v, is_causal=True, scale=spec.scale or None, enable_gqa=True
                )
            k, v = k.repeat_interleave(repeats, dim=1), v.repeat_interleave(repeats, dim=1)
        if not spec.softcap:
            return F.scaled_dot_product_attention(
                q, k, v, attn_mask=mask, is_causal=mask is None, scale=spec.scale or None
            )
        scores = (q @ k.transpose(-1, -2)) * (spec.scale or spec.head_dim**-0.5)
        scores = torch.tanh(scores / spec.softcap) * spec.softcap
        if mask is None:
            mask = torch.ones(length, length, dtype=torch.bool, device=q.device).tril()
        scores = scores.masked_fill(~mask, torch.finfo(scores.dtype).min)
        return scores.softmax(-1, dtype=torch.float32).to(q.dtype) @ v

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


def takes_groups(q: torch.Tensor, k: torch.Tensor, v: torch.Tensor) -> bool:
    """Whether heads of keys and values that queries share are read where they are.

    Flash attention does. Its alternatives do not: torch would take the plain one, which makes a
    matrix of all positions, so for them keys and values are repeated.
    """
    if q.device.type != "cuda":
        return False
    params = torch.backends.cuda.SDPAParams(q, k, v, None, 0.0, True, True)
    return torch.backends.cuda.can_use_flash_attention(params)


def make_norm(norm: Norm, width: int, model: ModelSpec) -> nn.Module:
    """One normalisation over the last dimension, as the model has them."""
    eps = model.norm_eps or default_eps(norm)
    if norm is Norm.RMS:
        kind = RaisedNorm if model.norm_adds_one else nn.RMSNorm
        return kind(width, eps=eps)
    return nn.LayerNorm(
        width, eps=eps, elementwise_affine=norm is not Norm.NO_WEIGHT, bias=norm is Norm.LAYER
    )


class RaisedNorm(nn.RMSNorm):
    """An RMS norm whose weight is added to 1; it is computed in fp32 to the end (Gemma)."""

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        """The last dimension, normed."""
        whole = F.rms_norm(x.float(), self.normalized_shape, eps=self.eps)
        return (whole * (1.0 + self.weight.float())).to(x.dtype)


def default_eps(norm: Norm) -> float:
    """What norms add to a variance where the spec does not say."""
    return 1e-6 if norm is Norm.RMS else 1e-5


def _outer_norm(spec: ModelSpec) -> nn.Module:
    return make_norm(spec.final_norm, spec.hidden_size, spec)


def _parameters(*modules: nn.Module | None) -> list[nn.Parameter]:
    return [
        parameter for module in modules if module is not None for parameter in module.parameters()
    ]
