"""Optimizers of the runtime: by name, what makes each, and whether it must see whole matrices.

Most treat every element apart, so a piece of a matrix is enough for them. Others look at rows,
columns or blocks of a parameter: they run only where each rank holds all of every parameter that it
updates, and there they see it in its own shape. `plan/executable.py` knows.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator
from typing import Any, Final

import torch
from torch import nn

from drystone.describe.job import TrainConfig
from drystone.describe.recipe import OPTIMIZERS, Optimizer, StepKernel
from drystone.errors import InvalidSpec

Groups = list[dict[str, Any]]
MakeOptimizer = Callable[[Groups], torch.optim.Optimizer]
_BLOCK: Final = 256  # values of an 8-bit state that share a scale (arXiv:2110.02861)
_CHUNK: Final = 2**22  # elements that are unpacked at a time: a multiple of the block
_MOMENTUM: Final = 0.9


def choose_optimizer(
    optimizer: Optimizer, config: TrainConfig, *, kernel: StepKernel = StepKernel.FUSED
) -> MakeOptimizer:
    """What makes the optimizer of a recipe from the engine's groups of pieces."""
    how = {"fused": kernel is StepKernel.FUSED, "foreach": kernel is StepKernel.FOREACH}
    lr, betas = config.learning_rate, (config.beta1, config.beta2)
    adam: dict[str, Any] = {"lr": lr, "betas": betas, "eps": config.epsilon}

    def make(groups: Groups) -> torch.optim.Optimizer:
        if OPTIMIZERS[optimizer].needs_whole_matrices:
            _refuse_pieces(optimizer, groups)
        match optimizer:
            case Optimizer.ADAM:
                return torch.optim.AdamW(groups, **adam, **how)
            case Optimizer.SGD:
                return torch.optim.SGD(groups, lr=lr, **how)
            case Optimizer.SGD_MOMENTUM:
                return torch.optim.SGD(groups, lr=lr, momentum=_MOMENTUM, **how)
            case Optimizer.LION:
                return Lion(groups, lr=lr, betas=betas)
            case Optimizer.ADAM_8BIT:
                return AdamW8bit(groups, **adam)
            case Optimizer.ADAFACTOR:
                return Shaped(groups, lr, lambda some, _: torch.optim.Adafactor(some, lr=lr))
            case Optimizer.MUON:
                return Shaped(groups, lr, lambda some, is_hidden: _muon(some, is_hidden, adam))
        known = [kind.value for kind in Optimizer if kind is not Optimizer.LAMB]
        raise InvalidSpec(
            f"optimizer {optimizer.value} cannot be trained yet",
            hint=f"Plan with {', '.join(known)}",
        )

    return make


def _muon(some: list[nn.Parameter], is_hidden: bool, adam: dict[str, Any]) -> Any:
    """Matrices of the blocks by Muon, with steps as long as AdamW's; the rest by AdamW."""
    if is_hidden:
        return torch.optim.Muon(some, lr=adam["lr"], adjust_lr_fn="match_rms_adamw")
    return torch.optim.AdamW(some, **adam)


def _refuse_pieces(optimizer: Optimizer, groups: Groups) -> None:
    for group in groups:
        for owned in group.get("owned", ()):
            if owned.end - owned.start != owned.shape.numel() or owned.part is not None:
                raise InvalidSpec(
                    f"{optimizer.value} needs whole matrices, and this plan divides {owned.name}",
                    hint="Plan for GPUs that hold the whole state, or with another optimizer",
                )


class Shaped(torch.optim.Optimizer):
    """An optimizer of torch over parameters in their own shapes, of which the pieces are flat.

    Its state is kept under the pieces, as views of the same memory, for checkpoints.
    """

    def __init__(self, groups: Groups, lr: float, make: Callable[..., Any]) -> None:
        super().__init__(groups, {"lr": lr})
        self._parts: list[tuple[dict[str, Any], Any, list[tuple[nn.Parameter, nn.Parameter]]]] = []
        for group in self.param_groups:
            for is_hidden in (True, False):
                pairs = [
                    (owned.value, nn.Parameter(owned.value.detach().view(owned.shape)))
                    for owned in group["owned"]
                    if _is_hidden_matrix(owned) is is_hidden
                ]
                if pairs:
                    inner = make([view for _, view in pairs], is_hidden)
                    self._parts.append((group, inner, pairs))

    @torch.no_grad()
    def step(self, closure: Any = None) -> None:
        """One step of each part."""
        for group, inner, pairs in self._parts:
            for inner_group in inner.param_groups:
                inner_group["lr"] = group["lr"]
                inner_group["weight_decay"] = group.get("weight_decay", 0.0)
            for value, view in pairs:
                view.grad = None if value.grad is None else value.grad.view(view.shape)
            inner.step()
            for value, view in pairs:
                view.grad = None
                if value not in self.state and view in inner.state:
                    self.state[value] = dict(_flattened(inner.state[view], view))


def _flattened(state: dict[str, Any], view: nn.Parameter) -> Iterator[tuple[str, Any]]:
    for key, entry in state.items():
        is_like = isinstance(entry, torch.Tensor) and entry.shape == view.shape and entry.dim() > 0
        yield key, entry.view(-1) if is_like else entry


def _is_hidden_matrix(owned: Any) -> bool:
    """A matrix of a block: neither vectors, nor the tables of the vocabulary."""
    return len(owned.shape) == 2 and owned.is_in_block


class Lion(torch.optim.Optimizer):
    """The sign of a mean of gradients (arXiv:2302.06675)."""

    def __init__(self, groups: Groups, *, lr: float, betas: tuple[float, float]) -> None:
        super().__init__(groups, {"lr": lr, "betas": betas, "weight_decay": 0.0})

    @torch.no_grad()
    def step(self, closure: Any = None) -> None:
        """Decay, move by the sign, then remember."""
        for group in self.param_groups:
            values = [value for value in group["params"] if value.grad is not None]
            if not values:
                continue
            for value in values:
                if not self.state[value]:
                    self.state[value]["exp_avg"] = torch.zeros_like(value)
            means = [self.state[value]["exp_avg"] for value in values]
            gradients = [value.grad for value in values]
            first, second = group["betas"]
            torch._foreach_mul_(values, 1.0 - group["lr"] * group["weight_decay"])
            signs = torch._foreach_lerp(means, gradients, 1.0 - first)
            torch._foreach_sign_(signs)
            torch._foreach_add_(values, signs, alpha=-group["lr"])
            torch._foreach_lerp_(means, gradients, 1.0 - second)


class AdamW8bit(torch.optim.Optimizer):
    """AdamW whose two moments take a byte each, scaled block by block (arXiv:2110.02861)."""

    def __init__(
        self, groups: Groups, *, lr: float, betas: tuple[float, float], eps: float
    ) -> None:
        super().__init__(groups, {"lr": lr, "betas": betas, "eps": eps, "weight_decay": 0.0})
        self._codes: dict[tuple[torch.device, bool], torch.Tensor] = {}

    @torch.no_grad()
    def step(self, closure: Any = None) -> None:
        """Unpacked, moved and packed again, a few megabytes at a time."""
        for group in self.param_groups:
            for value in group["params"]:
                if value.grad is None:
                    continue
                state = self.state[value]
                if not state:
                    self._begin(state, value)
                state["step"] += 1
                for start in range(0, value.numel(), _CHUNK):
                    self._move(group, state, value, start, min(start + _CHUNK, value.numel()))

    def _begin(self, state: dict[str, torch.Tensor], value: torch.Tensor) -> None:
        num_blocks = -(-value.numel() // _BLOCK)
        state["step"] = torch.zeros(())  # on the host: it is read
        for name, is_signed in (("exp_avg", True), ("exp_avg_sq", False)):
            nothing = int(self._table(value.device, is_signed=is_signed).abs().argmin())
            state[name] = torch.full_like(value, nothing, dtype=torch.uint8)
            state[f"{name}_scale"] = torch.zeros(num_blocks, device=value.device)

    def _move(
        self,
        group: dict[str, Any],
        state: dict[str, torch.Tensor],
        value: torch.Tensor,
        start: int,
        end: int,
    ) -> None:
        gradient = value.grad[start:end]
        (first, second), number = group["betas"], float(state["step"])
        mean = self._unpack(state, "exp_avg", start, end, is_signed=True)
        square = self._unpack(state, "exp_avg_sq", start, end, is_signed=False)
        mean.lerp_(gradient, 1.0 - first)
        square.mul_(second).addcmul_(gradient, gradient, value=1.0 - second)
        self._pack(state, "exp_avg", mean, start, end, is_signed=True)
        self._pack(state, "exp_avg_sq", square, start, end, is_signed=False)
        part = value[start:end]
        part.mul_(1.0 - group["lr"] * group["weight_decay"])
        below = square.sqrt_().div_((1.0 - second**number) ** 0.5).add_(group["eps"])
        part.addcdiv_(mean, below, value=-group["lr"] / (1.0 - first**number))

    def _unpack(
        self, state: dict[str, torch.Tensor], name: str, start: int, end: int, *, is_signed: bool
    ) -> torch.Tensor:
        codes = state[name][start:end]
        table = self._table(codes.device, is_signed=is_signed)
        scales = state[f"{name}_scale"][start // _BLOCK : -(-end // _BLOCK)]
        return table[codes.long()] * scales.repeat_interleave(_BLOCK)[: end - start]

    def _pack(
        self,
        state: dict[str, torch.Tensor],
        name: str,
        values: torch.Tensor,
        start: int,
        end: int,
        *,
        is_signed: bool,
    ) -> None:
        table = self._table(values.device, is_signed=is_signed)
        padded = nn.functional.pad(values, (0, -len(values) % _BLOCK)).view(-1, _BLOCK)
        scales = padded.abs().amax(dim=1)
        state[f"{name}_scale"][start // _BLOCK : -(-end // _BLOCK)] = scales
        shares = (padded / scales.clamp_min(1e-38)[:, None]).view(-1)[: end - start]
        between = (table[1:] + table[:-1]) / 2
        state[name][start:end] = torch.bucketize(shares, between).to(torch.uint8)

    def _table(self, device: torch.device, *, is_signed: bool) -> torch.Tensor:
        key = (device, is_signed)
        if key not in self._codes:
            self._codes[key] = dynamic_codes(is_signed=is_signed).to(device)
        return self._codes[key]


def dynamic_codes(*, is_signed: bool) -> torch.Tensor:
    """256 numbers, ascending: each decade from 1e-7 to 1 has more than the one below it.

    So small values keep an order of magnitude, and large ones some digits (arXiv:2110.02861).
    """
    decades, bits = 7, 7 if is_signed else 8
    numbers: list[float] = [0.0]
    for decade in range(decades):
        count = 2 ** max(bits - decades + decade, 0)
        edges = torch.linspace(0.1, 1.0, count + 1, dtype=torch.float64)
        middles = ((edges[1:] + edges[:-1]) / 2).tolist()
        numbers += [10.0 ** (decade - decades + 1) * middle for middle in middles]
    if is_signed:
        numbers += [-number for number in numbers if number]
    numbers.append(1.0)
    return torch.tensor(sorted(numbers), dtype=torch.float32)
