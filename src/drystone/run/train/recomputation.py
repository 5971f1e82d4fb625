"""Does a module compute the same when a block of it is computed again?

The engine runs a block without a graph, keeps what entered it, and runs it once more for the
backward pass. A block that remembers something in between (a cache of keys and values, a count of
calls, statistics in a buffer) computes something else the second time, and its gradients are wrong
without a word. So before a module is accepted its first block is computed both ways and compared.
"""

from __future__ import annotations

from typing import Any, Final

import torch

from drystone.errors import InvalidSpec
from drystone.run.train.models.layered import Batch, NamedBlocks

_TOLERANCE: Final = 1e-4  # of the largest value; the same operations differ by rounding at most
_SEED: Final = 20
_HINT: Final = (
    "Blocks must be functions of what they are given: switch caches and running statistics off, "
    "or train with a script of your own (command: in docs/jobs.md)"
)


def check_recomputation(model: NamedBlocks, batch: Batch) -> None:
    """Compare a block computed once with one computed again; raise with what differs."""
    before = {name: one.clone() for name, one in model.module.named_buffers()}
    with torch.random.fork_rng(devices=[]):
        once = _compute(model, batch, is_again=False)
        again = _compute(model, batch, is_again=True)
    for what, expected in once.items():
        if not _are_close(again[what], expected):
            raise InvalidSpec(
                f"the first block of {type(model.module).__name__} gives another {what} when it is "
                "computed again, as the engine does for the backward pass",
                hint=_HINT,
            )
    for name, one in model.module.named_buffers():
        if not torch.equal(torch.nan_to_num(one), torch.nan_to_num(before[name])):
            raise InvalidSpec(
                f"{type(model.module).__name__} changes its buffer {name} in the forward pass, "
                "which the engine runs more than once",
                hint=_HINT,
            )


def check_extras(model: NamedBlocks, batch: Batch) -> None:
    """All blocks must be given the same besides the hidden state: the engine gives all the same."""
    with torch.no_grad():
        first, *others = model.extras_of_blocks(batch)
    for index, extras in enumerate(others, start=1):
        if not _are_same(extras, first):
            raise InvalidSpec(
                f"block {index} of {type(model.module).__name__} is given something else than the "
                "first one besides the hidden state, as a mask of its own",
                hint="The engine gives every block what the first one gets. Let blocks make their "
                "own masks, or train with a script of your own (command: in docs/jobs.md)",
            )


def _compute(model: NamedBlocks, batch: Batch, *, is_again: bool) -> dict[str, torch.Tensor]:
    """The output of the first block, and its gradients."""
    with torch.no_grad():
        torch.manual_seed(_SEED)
        entered, extras = model.embed(batch)
        if is_again:
            torch.manual_seed(_SEED)
            model.run_block(0, entered, extras)
    entered = entered.detach().requires_grad_()
    torch.manual_seed(_SEED)
    left = model.run_block(0, entered, extras)
    torch.manual_seed(_SEED)
    named = {
        f"gradient of {name}": one
        for name, one in model.blocks[0].named_parameters()
        if one.requires_grad
    }
    wanted = {"gradient of its input": entered, **named}
    gradients = torch.autograd.grad(
        left, list(wanted.values()), torch.randn_like(left), allow_unused=True
    )
    found = {
        name: torch.zeros(()) if one is None else one
        for name, one in zip(wanted, gradients, strict=True)
    }
    return {"output": left.detach(), **found}


def _are_close(one: torch.Tensor, other: torch.Tensor) -> bool:
    if one.shape != other.shape:
        return False
    scale = float(other.abs().max()) if other.numel() else 0.0
    return torch.allclose(one, other, rtol=0.0, atol=_TOLERANCE * scale, equal_nan=True)


def _are_same(one: Any, other: Any) -> bool:
    if one is other:
        return True
    if isinstance(one, torch.Tensor) and isinstance(other, torch.Tensor):
        return one.shape == other.shape and torch.equal(one, other)
    if type(one) is not type(other):
        return False
    if isinstance(one, dict):
        return one.keys() == other.keys() and all(_are_same(one[key], other[key]) for key in one)
    if isinstance(one, tuple | list):
        return len(one) == len(other) and all(map(_are_same, one, other))
    return bool(one == other)
