"""Activation recomputation: what a block keeps for its backward pass, and what it computes again.

Selective recomputation keeps every second matrix product and the result of attention, which are
what it costs most to compute again, and recomputes the rest.
"""

from __future__ import annotations

from collections.abc import Callable
from functools import partial
from typing import Any, Final

import torch
from torch.utils.checkpoint import (
    CheckpointPolicy,
    checkpoint,
    create_selective_checkpoint_contexts,
)

from drystone.describe.recipe import Recompute, RecomputeKind

Run = Callable[..., torch.Tensor]

_ATEN: Final = torch.ops.aten
_PRODUCTS: Final = (_ATEN.mm.default, _ATEN.addmm.default)
_ATTENTION: Final = tuple(
    getattr(_ATEN, name).default
    for name in (
        "_scaled_dot_product_flash_attention",
        "_scaled_dot_product_flash_attention_for_cpu",
        "_scaled_dot_product_efficient_attention",
        "_scaled_dot_product_cudnn_attention",
    )
)


def kind_of_block(recompute: Recompute, index: int) -> RecomputeKind:
    """What is recomputed of one block: every `every`-th is, the others keep all."""
    return recompute.kind if index % recompute.every < 1 else RecomputeKind.NONE


def recomputing(run: Run, kind: RecomputeKind) -> Run:
    """The same, with a graph that keeps only what the kind says.

    It must draw the same chance whenever it runs: nothing here remembers a generator's state.
    """
    if kind is RecomputeKind.NONE:
        return run
    how: dict[str, Any] = {"use_reentrant": False, "preserve_rng_state": False}
    if kind is RecomputeKind.SELECTIVE:
        how["context_fn"] = _selective_contexts
    return partial(checkpoint, run, **how)


def _selective_contexts() -> tuple[Any, Any]:
    num_products = {False: 0, True: 0}  # in the first run, and in recomputation

    def choose(context: Any, operation: Any, *_: Any, **__: Any) -> CheckpointPolicy:
        if operation in _ATTENTION:
            return CheckpointPolicy.MUST_SAVE
        if operation in _PRODUCTS:
            num_products[context.is_recompute] += 1
            if num_products[context.is_recompute] % 2 == 1:
                return CheckpointPolicy.MUST_SAVE
        return CheckpointPolicy.PREFER_RECOMPUTE

    return create_selective_checkpoint_contexts(choose)
