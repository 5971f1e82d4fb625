"""How many bytes does an optimizer keep for each parameter, and how many does its step borrow?

The optimizer that was asked for is run once over fake tensors. Those that torch does not have keep
the state that their papers describe, in a loop over the parameters.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable
from typing import Any

import torch
from torch import nn
from torch.optim import SGD, AdamW, Muon, Optimizer

from drystone.describe.recipe import Optimizer as Kind
from drystone.describe.recipe import StepKernel
from drystone.estimate.module.trace import TraceRequest
from drystone.run.train.tracing.live import LiveBytes

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
    trained = [one for one in params if one.grad is not None]
    updated = [_master(one) for one in trained] if request.has_master else trained
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
    flat = [one for value in state.values()
            for one in (value if isinstance(value, tuple | list) else (value,))]  # fmt: skip
    return sum(live.size_bytes(one) for one in flat if isinstance(one, torch.Tensor))


def _optimizers(params: list[nn.Parameter], request: TraceRequest) -> list[Optimizer]:
    if not params:
        return []
    kernel = {
        StepKernel.FUSED: {"fused": True},
        StepKernel.FOREACH: {"foreach": True},
        StepKernel.LOOP: {"foreach": False},
    }[request.step_kernel]
    if request.optimizer is Kind.MUON:
        matrices = [one for one in params if one.dim() == 2]
        rest = [one for one in params if one.dim() != 2]
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
