"""Frozen matrices in four bits (QLoRA): packing, unpacking, and the product with such a matrix.

Normal floats (NF4, arXiv:2305.14314, appendix E): 64 weights, counted row by row, share a scale,
the largest of them; each is the nearest of 16 numbers between -1 and 1 times that scale. A block of
64 takes 32 bytes and a scale of fp32, so 4.5 bits a weight. The scales are not quantised again.

What a block holds depends on its matrix alone, not on who keeps which part of it: every split of
a model computes with the same numbers. A matrix is unpacked where it multiplies, in the forward
pass and again in the backward pass, and is never kept.
"""

from __future__ import annotations

from math import prod
from typing import Any, Final, cast

import torch
from torch import nn
from torch.nn import functional as F  # noqa: N812  # torch's own custom

BLOCK: Final = 64  # weights that share a scale
BLOCK_BYTES: Final = BLOCK // 2 + 4  # two weights a byte, then the scale
PACKED: Final = "packed"  # the name of the parameter that stands in the place of `weight`
_CHUNK_BLOCKS: Final = 2**16  # unpacked at a time: 4 million weights
_NUMBERS: Final = (
    -1.0, -0.6961928009986877, -0.5250730514526367, -0.39491748809814453,
    -0.28444138169288635, -0.18477343022823334, -0.09105003625154495, 0.0,
    0.07958029955625534, 0.16093020141124725, 0.24611230194568634, 0.33791524171829224,
    0.44070982933044434, 0.5626170039176941, 0.7229568362236023, 1.0,
)  # fmt: skip


class QuantisedLinear(nn.Linear):
    """A linear layer whose matrix is packed, and frozen."""

    packed: nn.Parameter  # (blocks, BLOCK_BYTES), bytes
    pairs: torch.Tensor

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        """As with the matrix itself."""
        shape = (self.out_features, self.in_features)
        product = _Product.apply(x, self.packed, self.pairs, shape)
        product = cast("torch.Tensor", product)
        return product if self.bias is None else product + self.bias


def quantise(module: nn.Linear) -> None:
    """Turn a linear layer into one with a packed matrix, in its place."""
    weight = module.weight.detach()
    if weight.is_meta:
        shape = packed_shape(weight.shape)
        packed = torch.empty(shape, dtype=torch.uint8, device=weight.device)
    else:
        packed = pack(weight.reshape(-1))
    del module.weight
    module.__class__ = QuantisedLinear
    module.packed = nn.Parameter(packed, requires_grad=False)
    device = torch.device("cpu") if weight.is_meta else weight.device
    module.register_buffer("pairs", number_pairs(device), persistent=False)


def packed_shape(shape: torch.Size) -> torch.Size:
    """Of a packed matrix."""
    return torch.Size((-(-prod(shape) // BLOCK), BLOCK_BYTES))


def pack(values: torch.Tensor) -> torch.Tensor:
    """Weights, of which the first begins a block, as blocks of bytes; the last one is filled up."""
    blocks = F.pad(values.float(), (0, -len(values) % BLOCK)).view(-1, BLOCK)
    scales = blocks.abs().amax(dim=1, keepdim=True)
    numbers = torch.tensor(_NUMBERS, device=values.device)
    between = (numbers[1:] + numbers[:-1]) / 2
    shares = blocks / scales.clamp_min(torch.finfo(torch.float32).tiny)
    codes = torch.bucketize(shares, between, out_int32=True).to(torch.uint8)
    both = codes[:, 0::2] * 16 + codes[:, 1::2]
    return torch.cat((both, scales.view(torch.uint8)), dim=1)


def unpack(
    packed: torch.Tensor, pairs: torch.Tensor, shape: torch.Size | tuple[int, ...], *,
    dtype: torch.dtype,
) -> torch.Tensor:  # fmt: skip
    """The matrix, in a dtype; products of code and scale are rounded to it once."""
    whole = torch.empty(len(packed), BLOCK, dtype=dtype, device=packed.device)
    for start in range(0, len(packed), _CHUNK_BLOCKS):
        some = packed[start : start + _CHUNK_BLOCKS]
        scales = some[:, BLOCK // 2 :].contiguous().view(torch.float32)
        numbers = F.embedding(some[:, : BLOCK // 2].int(), pairs).flatten(1)
        whole[start : start + _CHUNK_BLOCKS] = numbers.mul_(scales)
    return whole.view(-1)[: prod(shape)].view(shape)


def number_pairs(device: torch.device) -> torch.Tensor:
    """The two numbers that each byte stands for."""
    numbers = torch.tensor(_NUMBERS, device=device)
    return torch.cartesian_prod(numbers, numbers)


class _Product(torch.autograd.Function):
    """`x W^T`, with W unpacked for each pass; W itself gets no gradient."""

    @staticmethod
    def forward(
        ctx: Any, x: torch.Tensor, packed: torch.Tensor, pairs: torch.Tensor, shape: tuple[int, int]
    ) -> torch.Tensor:
        ctx.save_for_backward(packed, pairs)
        ctx.shape = shape
        return F.linear(x, unpack(packed, pairs, shape, dtype=x.dtype))

    @staticmethod
    def backward(ctx: Any, *gradients: torch.Tensor) -> tuple[torch.Tensor | None, ...]:
        packed, pairs = ctx.saved_tensors
        left = gradients[0]
        return left @ unpack(packed, pairs, ctx.shape, dtype=left.dtype), None, None, None
