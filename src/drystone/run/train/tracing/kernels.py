"""What a GPU would keep where CPU keeps something else.

Tracing happens on fake CPU tensors. Most operators save the same tensors on every device. Three do
not, and under `CudaKernels` they are replaced by stand-ins that save what the CUDA kernels save:

- dropout: CPU saves a mask as wide as its input, CUDA one of a byte an element (`native_dropout`);
- attention with dropout: CPU falls back to the matrix of scores, CUDA stays fused;
- `rms_norm`: CPU composes it from seven operators, CUDA keeps its input and one number a row.
"""

from __future__ import annotations

import math
import sys
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from typing import Any

import torch
from torch.nn import functional as F  # noqa: N812  # torch's own custom
from torch.overrides import TorchFunctionMode

from drystone.describe.recipe import AttentionKernel
from drystone.estimate.module.trace import Kernels, TraceRequest


@contextmanager
def chosen_kernels(request: TraceRequest) -> Iterator[None]:
    """Run what is inside with the kernels that were asked for."""
    if request.attention is AttentionKernel.EAGER:
        from torch.nn.attention import SDPBackend, sdpa_kernel

        with sdpa_kernel(SDPBackend.MATH):
            yield
    elif request.kernels is Kernels.CUDA:
        with CudaKernels(), _without_packing():
            yield
    else:
        yield


@contextmanager
def _without_packing() -> Iterator[None]:
    """Let transformers see that sequences are not packed.

    It reads that from values, and where there are none it builds a mask as long as the sequence
    squared, which a real run does not have.
    """
    masking = sys.modules.get("transformers.masking_utils")
    original = getattr(masking, "find_packed_sequence_indices", None)
    if masking is None or original is None:
        yield
        return
    vars(masking)["find_packed_sequence_indices"] = lambda *_, **__: None
    try:
        yield
    finally:
        vars(masking)["find_packed_sequence_indices"] = original


class CudaKernels(TorchFunctionMode):
    """Replaces the operators that save other tensors on CUDA than on CPU."""

    def __torch_function__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        """One operator, or its stand-in."""
        kwargs = kwargs or {}
        stand_in = _STAND_INS.get(func)
        return func(*args, **kwargs) if stand_in is None else stand_in(*args, **kwargs)


def _dropout(input: torch.Tensor, p: float = 0.5, training: bool = True, *_: Any, **__: Any) -> Any:
    if not training or not 0 < p < 1:
        return input
    return torch.native_dropout(input, p, True)[0]


def _attention(
    query: Any, key: Any, value: Any, attn_mask: Any = None, dropout_p: float = 0.0, *rest: Any,
    **kwargs: Any,
) -> Any:  # fmt: skip
    return torch._C._nn.scaled_dot_product_attention(
        query, key, value, attn_mask, 0.0, *rest, **kwargs
    )


def _rms_norm(input: Any, normalized_shape: Any, weight: Any = None, eps: Any = None) -> Any:
    return _RmsNorm.apply(input, math.prod(normalized_shape), weight)


class _RmsNorm(torch.autograd.Function):
    """The bytes of the fused kernel; its values never matter."""

    @staticmethod
    def forward(ctx: Any, input: torch.Tensor, width: int, weight: torch.Tensor | None) -> Any:
        inverse = torch.empty(input.numel() // width, dtype=torch.float32)
        ctx.save_for_backward(input, inverse, weight)
        return torch.empty_like(input)

    @staticmethod
    def backward(ctx: Any, gradient: torch.Tensor) -> Any:
        input, _, weight = ctx.saved_tensors
        of_weight = None if weight is None else torch.empty_like(weight)
        return torch.empty_like(input), None, of_weight


_STAND_INS: dict[Any, Callable[..., Any]] = {
    F.dropout: _dropout,
    torch.dropout: _dropout,
    F.scaled_dot_product_attention: _attention,
    F.rms_norm: _rms_norm,
    torch.rms_norm: _rms_norm,
}
