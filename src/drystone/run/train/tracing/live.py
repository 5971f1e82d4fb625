"""How many bytes are alive, and how many were at most? Counted from outside, storage by storage.

A `LiveBytes` sees every operator that runs inside it. A storage counts once, from the operator that
returns it until the last reference to it dies. It equals torch's MemTracker on plain models at a
fraction of the time, because it keeps no statistics per module.
"""

from __future__ import annotations

import weakref
from collections.abc import Callable
from typing import Any

import torch
from torch.utils._python_dispatch import TorchDispatchMode
from torch.utils.flop_counter import (
    flop_registry,
    sdpa_backward_flop_count,
    sdpa_flop_count,
)

CUDA_GRANULE_BYTES = 512  # the caching allocator hands out multiples of it (CUDACachingAllocator)


class LiveBytes(TorchDispatchMode):
    """Adds up the storages that are alive, and the FLOPs of what runs."""

    def __init__(self, *, granule_bytes: int = 1) -> None:
        super().__init__()
        self.live_bytes = 0
        self.peak_bytes = 0
        self.flops = 0
        self._granule_bytes = granule_bytes
        self._watched: dict[int, weakref.ref[Any]] = {}
        self._flop_formulas = _flop_formulas()
        self._device_of = torch.ops.prim.device.default

    def size_bytes(self, tensor: torch.Tensor) -> int:
        """What this tensor's storage takes from the allocator."""
        return self.rounded(tensor.untyped_storage().nbytes())

    def rounded(self, num_bytes: int) -> int:
        """What an allocation of `num_bytes` takes."""
        return -(-num_bytes // self._granule_bytes) * self._granule_bytes

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        """Run the operator, then count what it returned."""
        kwargs = kwargs or {}
        result = func(*args, **kwargs)
        if func is self._device_of:  # asked thousands of times, allocates nothing
            return result
        formula = self._flop_formulas.get(func._overloadpacket)
        if formula is not None:
            self.flops += formula(*args, **kwargs, out_val=result)
        for one in result if isinstance(result, tuple | list) else (result,):
            if isinstance(one, torch.Tensor):
                self._watch(one)
        self.peak_bytes = max(self.peak_bytes, self.live_bytes)
        return result

    def _watch(self, tensor: torch.Tensor) -> None:
        storage = tensor.untyped_storage()
        key = storage._cdata
        if key in self._watched:
            return
        size_bytes = self.rounded(storage.nbytes())

        def forget(_: object) -> None:
            self.live_bytes -= size_bytes
            self._watched.pop(key, None)

        self._watched[key] = weakref.ref(storage, forget)
        self.live_bytes += size_bytes


def _flop_formulas() -> dict[Any, Callable[..., int]]:
    """The table of torch, and the fused attention of CPU, which is missing there."""

    def attention(query: Any, key: Any, value: Any, *_: Any, **__: Any) -> int:
        return int(sdpa_flop_count(query.shape, key.shape, value.shape))

    def attention_backward(grad: Any, query: Any, key: Any, value: Any, *_: Any, **__: Any) -> int:
        return int(sdpa_backward_flop_count(grad.shape, query.shape, key.shape, value.shape))

    aten = torch.ops.aten
    return {
        **flop_registry,
        aten._scaled_dot_product_flash_attention_for_cpu: attention,
        aten._scaled_dot_product_flash_attention_for_cpu_backward: attention_backward,
    }
