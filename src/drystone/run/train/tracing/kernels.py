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
from collections.abc import Callable, Iterable, Iterator
from contextlib import contextmanager
from typing import Any

import torch
from torch import nn
from torch.nn import functional as F  # noqa: N812  # torch's own custom
from torch.optim import SGD, AdamW, Muon, Optimizer
from torch.overrides import TorchFunctionMode

from drystone.describe.recipe import AttentionKernel, StepKernel
from drystone.describe.recipe import Optimizer as Kind
from drystone.estimate.module.trace import Kernels, TraceRequest
from drystone.run.train.tracing.timeline import LiveBytes


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
    query: Any,
    key: Any,
    value: Any,
    attn_mask: Any = None,
    dropout_p: float = 0.0,
    *rest: Any,
    **kwargs: Any,
) -> Any:
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


_QUANTILE_BLOCK = 256  # values that share one fp32 scale in 8-bit states (arXiv:2110.02861)
_EIGHT_BIT_FROM_NUMEL = 4096  # smaller tensors keep 32-bit states (bitsandbytes)


class StepBytes:
    """The outcome of one optimizer step over some parameters."""

    def __init__(self, *, state_bytes: dict[int, int], temporaries_bytes: int) -> None:
        self.state_bytes = state_bytes  # by id of the parameter
        self.temporaries_bytes = temporaries_bytes


def measure_step(
    params: Iterable[nn.Parameter], request: TraceRequest, live: LiveBytes
) -> StepBytes:
    """Run one step over the parameters that have a gradient, and measure it."""
    trained = [param for param in params if param.grad is not None]
    updated = [_master(tensor) for tensor in trained] if request.has_master else trained
    optimizers = _optimizers(updated, request)
    live.peak_bytes = live.live_bytes
    for optimizer in optimizers:
        optimizer.step()
    state_bytes = {}
    for param, target in zip(trained, updated, strict=True):
        kept = sum(_state_size(optimizer.state.get(target, {}), live) for optimizer in optimizers)
        state_bytes[id(param)] = kept + (live.size_bytes(target) if request.has_master else 0)
    return StepBytes(
        state_bytes=state_bytes, temporaries_bytes=max(0, live.peak_bytes - live.live_bytes)
    )


def _master(param: nn.Parameter) -> nn.Parameter:
    master = nn.Parameter(torch.empty(param.shape, dtype=torch.float32))
    master.grad = torch.empty(param.shape, dtype=torch.float32)
    return master


def _state_size(state: dict[str, Any], live: LiveBytes) -> int:
    flat = [
        tensor
        for value in state.values()
        for tensor in (value if isinstance(value, tuple | list) else (value,))
    ]
    return sum(live.size_bytes(tensor) for tensor in flat if isinstance(tensor, torch.Tensor))


def _optimizers(params: list[nn.Parameter], request: TraceRequest) -> list[Optimizer]:
    if not params:
        return []
    kernel = {
        StepKernel.FUSED: {"fused": True},
        StepKernel.FOREACH: {"foreach": True},
        StepKernel.LOOP: {"foreach": False},
    }[request.step_kernel]
    if request.optimizer is Kind.MUON:
        matrices = [param for param in params if param.dim() == 2]
        rest = [param for param in params if param.dim() != 2]
        return ([Muon(matrices)] if matrices else []) + ([AdamW(rest, **kernel)] if rest else [])
    make: dict[Kind, Callable[[], Optimizer]] = {
        Kind.ADAM: lambda: AdamW(params, **kernel),
        Kind.LAMB: lambda: AdamW(params, foreach=False),
        Kind.SGD: lambda: SGD(params, lr=1e-3, **kernel),
        Kind.SGD_MOMENTUM: lambda: SGD(params, lr=1e-3, momentum=0.9, **kernel),
        Kind.ADAFACTOR: lambda: _Adafactor(params, {}),
        Kind.LION: lambda: _Lion(params, {}),
        Kind.ADAM_8BIT: lambda: _EightBitAdam(params, {}),
    }
    return [make[request.optimizer]()]


class _Adafactor(Optimizer):
    """A row and a column for each matrix, and the update as a temporary. arXiv:1804.04235.

    The one in torch looks at values, which fake tensors do not have.
    """

    @torch.no_grad()
    def step(self, closure: Any = None) -> None:
        for param in self.param_groups[0]["params"]:
            state = self.state[param]
            if param.dim() < 2:
                state["variance"] = torch.zeros_like(param)
            else:
                state["row"] = param.new_zeros(*param.shape[:-1], 1)
                state["column"] = param.new_zeros(*param.shape[:-2], 1, param.shape[-1])
            param.add_(param.grad.square(), alpha=-1e-4)


class _Lion(Optimizer):
    """One momentum as wide as the parameter, and the update as a temporary. arXiv:2302.06675."""

    @torch.no_grad()
    def step(self, closure: Any = None) -> None:
        for param in self.param_groups[0]["params"]:
            state = self.state[param]
            state["momentum"] = torch.zeros_like(param)
            param.add_(state["momentum"].mul(0.9).add_(param.grad).sign_(), alpha=-1e-4)


class _EightBitAdam(Optimizer):
    """Two moments of a byte each with block scales, in one kernel. arXiv:2110.02861."""

    @torch.no_grad()
    def step(self, closure: Any = None) -> None:
        for param in self.param_groups[0]["params"]:
            small = param.numel() < _EIGHT_BIT_FROM_NUMEL
            for name in ("first", "second"):
                width = torch.float32 if small else torch.uint8
                self.state[param][name] = torch.zeros(param.shape, dtype=width)
                if not small:
                    scales = -(-param.numel() // _QUANTILE_BLOCK)
                    self.state[param][f"{name} scales"] = torch.zeros(scales)
