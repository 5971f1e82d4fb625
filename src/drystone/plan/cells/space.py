"""Which splits are there? Every layout of a model on a number of equal GPUs, as arrays.

The space: tensor parallelism that divides heads and feed-forward and stays in a node, so it divides
the GPUs of a node unless all of the job is in one; context parallelism for long sequences; pipeline
stages up to the number of layers, interleaved where layers and micro-batches divide; the rest data
parallel. A data-parallel rank takes ceil(B / dp) sequences in micro-batches that divide it, so
counts that are no powers of two are as good as others. State is whole or sharded (ZeRO-1, ZeRO-3).
"""

from __future__ import annotations

from functools import lru_cache
from math import gcd

import numpy as np
import numpy.typing as npt

from drystone.describe.layout import Layouts, Sharding
from drystone.describe.model import Experts, ModelSpec

IntArray = npt.NDArray[np.int64]

# A context-parallel rank keeps at least this many tokens of a sequence, half of them from its
# beginning and half from its end, so that causal attention is balanced.
_MIN_TOKENS_PER_CONTEXT_RANK = 4096
_MAX_TENSOR_PARALLEL = 16
_VIRTUAL_STAGES = (1, 2, 4)
_SHARDINGS = np.array([Sharding.NONE, Sharding.ZERO1, Sharding.ZERO3], dtype=np.int64)
_COLUMNS = ("dp", "tp", "pp", "cp", "ep", "micro_batch", "sharding", "virtual_stages")


@lru_cache(maxsize=64)
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
    for tp in tensor_degrees(model, gpus_per_node, count):
        for cp in context_degrees(seq_len):
            if count % (tp * cp):
                continue
            rest = count // (tp * cp)
            for pp in divisors(rest):
                dp = rest // pp
                if pp > num_layers or dp > global_batch:
                    continue
                virtual = virtual_stages(num_layers, pp)
                degrees = expert_degrees(model, dp * cp * tp)
                shapes += [(dp, tp, pp, cp, ep, virtual) for ep in degrees]
    return shapes


def _product(shape: Shape, global_batch: int, most_micro_batch: int) -> IntArray:
    """All micro-batches, shardings and virtual stages of one shape, one column each."""
    dp, tp, pp, cp, ep, virtual = shape
    rank_batch = -(-global_batch // dp)
    inner = _inner_columns(rank_batch, most_micro_batch, dp * cp > 1, pp, virtual)
    out = np.empty((len(_COLUMNS), inner.shape[1]), dtype=np.int64)
    out[:5] = np.array((dp, tp, pp, cp, ep), dtype=np.int64)[:, None]
    out[5:] = inner
    return out


@lru_cache(maxsize=4096)
def _inner_columns(
    rank_batch: int, most_micro_batch: int, shards: bool, pp: int, virtual: tuple[int, ...]
) -> IntArray:
    """Micro-batch, sharding and virtual stages."""
    sharding = _SHARDINGS if shards else _SHARDINGS[:1]
    blocks = []
    for number in virtual:
        micro = _micro_batches(rank_batch, most_micro_batch)
        if number > 1:  # interleaving takes micro-batches in rounds of as many as there are stages
            micro = micro[(rank_batch // micro) % pp == 0]
        block = np.empty((3, len(micro) * len(sharding)), dtype=np.int64)
        block[0] = np.tile(micro, len(sharding))
        block[1] = np.repeat(sharding, len(micro))
        block[2] = number
        blocks.append(block)
    return np.concatenate(blocks, axis=1)


def virtual_stages(num_layers: int, pp: int) -> tuple[int, ...]:
    """Model chunks a stage may have: more than one only where layers divide evenly."""
    return tuple(
        virtual
        for virtual in _VIRTUAL_STAGES
        if virtual == 1 or (pp > 1 and num_layers % (pp * virtual) == 0)
    )


@lru_cache(maxsize=4096)
def divisors(number: int) -> tuple[int, ...]:
    """All of them, ascending."""
    small = [divisor for divisor in range(1, int(number**0.5) + 1) if number % divisor == 0]
    return tuple(sorted({*small, *(number // divisor for divisor in small)}))


@lru_cache(maxsize=4096)
def _micro_batches(rank_batch: int, most: int) -> IntArray:
    sizes = [size for size in divisors(rank_batch) if not most or size <= most]
    return np.array(sizes, dtype=np.int64)


@lru_cache(maxsize=4096)
def tensor_degrees(model: ModelSpec, gpus_per_node: int, count: int) -> tuple[int, ...]:
    """Tensor-parallel degrees for `count` GPUs that stay in a node and divide the model."""
    most = min(gpus_per_node, count, _MAX_TENSOR_PARALLEL)
    return tuple(
        degree
        for degree in model_tensor_degrees(model)
        if degree <= most and (count <= gpus_per_node or gpus_per_node % degree == 0)
    )


@lru_cache(maxsize=1024)
def model_tensor_degrees(model: ModelSpec) -> tuple[int, ...]:
    """Degrees that divide heads and feed-forward, and divide or repeat key-value heads."""
    common = 0
    for block in model.blocks:
        common = gcd(common, block.attention.num_heads)
        if not isinstance(block.feed_forward, Experts):
            common = gcd(common, block.feed_forward.ffn_size)
    kv_heads = [block.attention.num_kv_heads for block in model.blocks]
    return tuple(
        degree
        for degree in divisors(common)
        if all(number % degree == 0 or degree % number == 0 for number in kv_heads)
    )


def context_degrees(seq_len: int) -> tuple[int, ...]:
    """Powers of two that leave each rank enough of a sequence."""
    degrees = [1]
    while seq_len % (2 * degrees[-1]) == 0 and (
        seq_len // (2 * degrees[-1]) >= _MIN_TOKENS_PER_CONTEXT_RANK
    ):
        degrees.append(2 * degrees[-1])
    return tuple(degrees)


def expert_degrees(model: ModelSpec, ranks: int) -> tuple[int, ...]:
    """Expert-parallel degrees: they divide the experts and the ranks of a stage."""
    if not model.is_moe:
        return (1,)
    common = ranks
    for block in model.blocks:
        if isinstance(block.feed_forward, Experts):
            common = gcd(common, block.feed_forward.num_experts)
    return divisors(common)
