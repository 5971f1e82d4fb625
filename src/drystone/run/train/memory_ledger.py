"""How many bytes of tensors are alive, how many were at most, and an end to it: emulated memory.

A mode of torch that sees the result of every operation. Each new storage is counted until it dies,
so `live_bytes` and `peak_bytes` are exact for what tensors hold on a device: on a processor that
plays a GPU, and on fake tensors, which hold nothing. With a cap, going beyond it raises torch's own
out-of-memory error in the operation that did. What stands in host memory beside a GPU (offloaded
activations, copies for a checkpoint) is made inside `host_memory` and does not count.
"""

from __future__ import annotations

import weakref
from collections.abc import Iterator
from contextlib import contextmanager
from typing import Any

import torch
from torch._guards import detect_fake_mode
from torch.utils._python_dispatch import TorchDispatchMode
from torch.utils._pytree import tree_leaves

from drystone.errors import InvalidSpec


class EmulatedOutOfMemory(torch.OutOfMemoryError):
    """What CUDA would raise, with the numbers."""

    def __init__(self, *, asked_bytes: int, live_bytes: int, cap_bytes: int) -> None:
        self.asked_bytes, self.live_bytes, self.cap_bytes = asked_bytes, live_bytes, cap_bytes
        super().__init__(
            f"emulated device out of memory: tried to allocate {asked_bytes} bytes, "
            f"{live_bytes} of {cap_bytes} are in use"
        )


class Ledger(TorchDispatchMode):
    """Counts the storages that operations inside `with ledger:` make."""

    def __init__(self, cap_bytes: int = 0) -> None:
        super().__init__()
        if cap_bytes < 0:
            raise InvalidSpec(f"a memory cap of {cap_bytes} bytes, must be >= 0 (0: none)")
        self.cap_bytes = cap_bytes
        self.live_bytes = self.peak_bytes = 0
        self._sizes: dict[int, int] = {}
        self._watched: dict[int, weakref.ref[Any]] = {}
        self._num_paused = 0
        self._counts_fake = False

    def __enter__(self) -> Ledger:
        # Where tensors are real, those of libraries that only ask for shapes hold nothing.
        self._counts_fake = detect_fake_mode() is not None
        _active.append(self)
        super().__enter__()
        return self

    def __exit__(self, *error: Any) -> None:
        super().__exit__(*error)
        _active.remove(self)

    def reset_peak(self) -> None:
        """From now on, the largest counts anew."""
        self.peak_bytes = self.live_bytes

    def __torch_dispatch__(
        self, function: Any, types: Any, args: Any = (), kwargs: Any = None
    ) -> Any:
        """Run it, then look at what came out."""
        if any(hasattr(one, "__tensor_flatten__") for one in types):
            return NotImplemented  # made of other tensors (DTensor): their operations come here
        out = function(*args, **(kwargs or {}))
        if not self._num_paused:
            if isinstance(out, torch.Tensor):
                self._see(out)
            else:
                for one in tree_leaves(out):
                    if isinstance(one, torch.Tensor):
                        self._see(one)
        return out

    def resize(self, storage: torch.UntypedStorage, num_bytes: int) -> None:
        """Resize a storage, which no operation shows; beyond the cap it does not happen."""
        key = storage._cdata
        if key in self._sizes:
            self._set(key, num_bytes)
        storage.resize_(num_bytes)

    def _see(self, tensor: torch.Tensor) -> None:
        # Asking a fake tensor for its device is an operation again, and as slow as one.
        fake_device = getattr(tensor, "fake_device", None)
        if (fake_device or tensor.device).type == "meta" or (fake_device and not self._counts_fake):
            return
        # A tensor that is split over ranks says the size of the whole; here is its part.
        storage = getattr(tensor, "_local_tensor", tensor).untyped_storage()
        key = storage._cdata
        if key in self._sizes:
            return

        def drop(_: object) -> None:
            self.live_bytes -= self._sizes.pop(key, 0)
            self._watched.pop(key, None)

        self._sizes[key] = 0
        self._watched[key] = weakref.ref(storage, drop)
        self._set(key, storage.nbytes())

    def _set(self, key: int, num_bytes: int) -> None:
        asked = num_bytes - self._sizes[key]
        if self.cap_bytes and asked > 0 and self.live_bytes + asked > self.cap_bytes:
            raise EmulatedOutOfMemory(
                asked_bytes=asked, live_bytes=self.live_bytes, cap_bytes=self.cap_bytes
            )
        self._sizes[key] = num_bytes
        self.live_bytes += asked
        self.peak_bytes = max(self.peak_bytes, self.live_bytes)

    @contextmanager
    def paused(self) -> Iterator[None]:
        """What is made inside is not counted."""
        self._num_paused += 1
        try:
            yield
        finally:
            self._num_paused -= 1


_active: list[Ledger] = []


def active_ledger() -> Ledger | None:
    """The one that counts now, if any."""
    return _active[-1] if _active else None


def resize_storage(tensor: torch.Tensor, num_bytes: int) -> None:
    """Give a tensor's memory back, or take it again; counted where somebody counts."""
    storage = tensor.untyped_storage()
    ledger = active_ledger()
    if ledger is None:
        storage.resize_(num_bytes)
    else:
        ledger.resize(storage, num_bytes)


@contextmanager
def host_memory() -> Iterator[None]:
    """Tensors made inside stand in host memory, not on the (emulated) device."""
    ledger = active_ledger()
    if ledger is None:
        yield
        return
    with ledger.paused():
        yield
