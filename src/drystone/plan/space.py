"""Which splits are there? Every layout of a model on a number of equal GPUs, as arrays.

The space: tensor parallelism inside a node and dividing heads and feed-forward; context parallelism
for long sequences; pipeline stages up to the number of layers; the rest data parallel. A
data-parallel rank takes ceil(B / dp) sequences in micro-batches that divide it, so counts that are
no powers of two are as good as others. State is whole or sharded (ZeRO-1, ZeRO-3).
"""

from __future__ import annotations

from functools import lru_cache
from math import gcd

import numpy as np
import numpy.typing as npt

from drystone.describe.layout import Layouts, Sharding
from drystone.describe.model import Experts, ModelSpec

IntArray = npt.NDArray[np.int64]

# A context-parallel rank keeps at least this many tokens of a sequence.
_LEAST_TOKENS_PER_CONTEXT_RANK = 2048
_MOST_TENSOR_PARALLEL = 16
_VIRTUAL_STAGES = (1, 2, 4)
_SHARDINGS = np.array([Sharding.NONE, Sharding.ZERO1, Sharding.ZERO3], dtype=np.int64)
_COLUMNS = ("dp", "tp", "pp", "cp", "ep", "micro_batch", "sharding", "virtual_stages")


def enumerate_layouts(
    model: ModelSpec,
    *,
    seq_len: int,
    global_batch: int,
    gpus_per_node: int,
    counts: tuple[int, ...],
    most_micro_batch: int = 0,
) -> Layouts:
    """Every layout on each of `counts` GPUs; `most_micro_batch` is a limit unless it is 0."""
    parts = [
        _product(shape, global_batch, most_micro_batch)
        for count in counts
        for shape in _shapes(model, seq_len, global_batch, gpus_per_node, count)
    ]
    columns = (
        np.concatenate(parts, axis=1) if parts else np.zeros((len(_COLUMNS), 0), dtype=np.int64)
    )
    named = dict(zip(_COLUMNS, columns, strict=True))
    return Layouts.build(**named, sequence_parallel=named["tp"] > 1)


Shape = tuple[int, int, int, int, int, tuple[int, ...]]  # dp, tp, pp, cp, ep, virtual stages


def _shapes(
    model: ModelSpec, seq_len: int, global_batch: int, gpus_per_node: int, count: int
) -> list[Shape]:
    """The degrees that multiply to `count`."""
    num_layers = model.num_layers
    shapes: list[Shape] = []
    for tp in tensor_degrees(model, gpus_per_node):
        for cp in context_degrees(seq_len):
            if count % (tp * cp):
                continue
            rest = count // (tp * cp)
            for pp in divisors(rest):
                dp = rest // pp
                if pp > num_layers or dp > global_batch:
                    continue
                virtual = tuple(
                    one for one in _VIRTUAL_STAGES
                    if one == 1 or (pp > 1 and num_layers % (pp * one) == 0)
                )  # fmt: skip
                shapes += [(dp, tp, pp, cp, ep, virtual) for ep in expert_degrees(model, dp * cp)]
    return shapes


def _product(shape: Shape, global_batch: int, most_micro_batch: int) -> IntArray:
    """All micro-batches, shardings and virtual stages of one shape, one column each."""
    dp, tp, pp, cp, ep, virtual = shape
    micro = _micro_batches(-(-global_batch // dp), most_micro_batch)
    sharding = _SHARDINGS if dp * cp > 1 else _SHARDINGS[:1]
    num = len(micro) * len(sharding) * len(virtual)
    out = np.empty((len(_COLUMNS), num), dtype=np.int64)
    out[:5] = np.array((dp, tp, pp, cp, ep), dtype=np.int64)[:, None]
    out[5] = np.tile(micro, len(sharding) * len(virtual))
    out[6] = np.tile(np.repeat(sharding, len(micro)), len(virtual))
    out[7] = np.repeat(np.array(virtual, dtype=np.int64), len(micro) * len(sharding))
    return out


@lru_cache(maxsize=4096)
def divisors(number: int) -> tuple[int, ...]:
    """All of them, ascending."""
    small = [one for one in range(1, int(number**0.5) + 1) if number % one == 0]
    return tuple(sorted({*small, *(number // one for one in small)}))


@lru_cache(maxsize=4096)
def _micro_batches(rank_batch: int, most: int) -> IntArray:
    sizes = [one for one in divisors(rank_batch) if not most or one <= most]
    return np.array(sizes, dtype=np.int64)


@lru_cache(maxsize=1024)
def tensor_degrees(model: ModelSpec, gpus_per_node: int) -> tuple[int, ...]:
    """Tensor-parallel degrees that stay in a node and divide heads and feed-forward."""
    common = 0
    for block in model.blocks:
        common = gcd(common, block.attention.num_heads)
        if not isinstance(block.feed_forward, Experts):
            common = gcd(common, block.feed_forward.ffn_size)
    most = min(gpus_per_node, _MOST_TENSOR_PARALLEL)
    return tuple(one for one in divisors(common) if one <= most)


def context_degrees(seq_len: int) -> tuple[int, ...]:
    """Powers of two that leave each rank enough of a sequence."""
    degrees = [1]
    while seq_len % (2 * degrees[-1]) == 0 and (
        seq_len // (2 * degrees[-1]) >= _LEAST_TOKENS_PER_CONTEXT_RANK * 2
    ):
        degrees.append(2 * degrees[-1])
    return tuple(degrees)


def expert_degrees(model: ModelSpec, ranks: int) -> tuple[int, ...]:
    """Expert-parallel degrees: they divide the experts and the data-parallel ranks."""
    if not model.is_moe:
        return (1,)
    common = ranks
    for block in model.blocks:
        if isinstance(block.feed_forward, Experts):
            common = gcd(common, block.feed_forward.num_experts)
    return divisors(common)
