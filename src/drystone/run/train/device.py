"""What an accelerator does beside its host: copies on a stream of their own, from pinned memory.

An accelerator runs what it is asked for later, in the order of a stream; copies have one apart, so
that they run beside compute. Whoever copies must wait in three places, all of which are here: the
copy for whoever made what it reads, whoever uses the copy for its end, and whoever frees what is
read for its end too. On a processor all of it has happened when a call returns.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import torch

from drystone.run.train.emulate import host_memory


def is_accelerator(device: torch.device) -> bool:
    """Whether it computes later than it is asked to, in memory of its own."""
    return device.type not in ("cpu", "meta")


def use_device(device: torch.device) -> None:
    """What this thread does on an accelerator without naming it, it does on this one."""
    if is_accelerator(device):
        torch.get_device_module(device).set_device(device)


def map_tensors(change: Callable[[torch.Tensor], torch.Tensor], batch: Any) -> Any:
    """The same tensor, list (also for a tuple) or dict with other tensors."""
    if isinstance(batch, torch.Tensor):
        return change(batch)
    if isinstance(batch, dict):
        return {key: map_tensors(change, one) for key, one in batch.items()}
    if isinstance(batch, tuple | list):
        return [map_tensors(change, one) for one in batch]
    return batch


class Copies:
    """Copies between the host and one device."""

    def __init__(self, device: torch.device) -> None:
        self.device, self._is_async = device, is_accelerator(device)
        self._module: Any = torch.get_device_module(device)
        self._stream = self._module.Stream(device=device) if self._is_async else None
        self._leaving: tuple[torch.Tensor, Any] | None = None

    def host_like(self, tensor: torch.Tensor) -> torch.Tensor:
        """Host memory for it, pinned where a device copies."""
        with host_memory():
            return torch.empty(tensor.shape, dtype=tensor.dtype, pin_memory=self._is_async)

    def to_host(self, tensor: torch.Tensor) -> torch.Tensor:
        """Copy away what is never changed; it stays until the next copy, or `finish`.

        So its memory is used again only after the copy, without the allocator having to ask.
        """
        self.finish()
        host, done = self.host_like(tensor), None
        with host_memory():
            if self._is_async:
                done = self._beside(lambda: host.copy_(tensor, non_blocking=True))
            else:
                host.copy_(tensor)
        self._leaving = (tensor, done)
        return host

    def to_device(self, host: torch.Tensor) -> Callable[[], torch.Tensor]:
        """Begin to copy back; what is returned waits for it."""
        there = torch.empty(host.shape, dtype=host.dtype, device=self.device)
        if not self._is_async:
            there.copy_(host)
            return lambda: there
        done = self._beside(lambda: there.copy_(host, non_blocking=True))

        def wait() -> torch.Tensor:
            self._module.current_stream(self.device).wait_event(done)
            return there

        return wait

    def batch_to_device(self, batch: Any) -> Callable[[], Any]:
        """Begin to copy a batch, which nobody has waited for yet; what is returned waits for it."""
        if not self._is_async:
            there = map_tensors(lambda one: one.to(self.device), batch)
            return lambda: there
        pinned = map_tensors(self._pinned, batch)
        # Of memory of this stream: nothing that is computed need end before.
        with self._module.stream(self._stream):
            there = map_tensors(lambda one: one.to(self.device, non_blocking=True), pinned)
            done = self._event()

        def wait() -> Any:
            now = self._module.current_stream(self.device)
            now.wait_event(done)
            map_tensors(lambda one: _used_by(one, now), there)
            return there

        return wait

    def _pinned(self, tensor: torch.Tensor) -> torch.Tensor:
        with host_memory():
            return self.host_like(tensor).copy_(tensor) if tensor.device.type == "cpu" else tensor

    def finish(self) -> None:
        """Let go of what was copied away last."""
        if self._leaving is not None and self._leaving[1] is not None:
            self._module.current_stream(self.device).wait_event(self._leaving[1])
        self._leaving = None

    def mark(self) -> Callable[[], None]:
        """What is returned waits, on the host, for all that was asked of the device until now."""
        done = self._event() if self._is_async else None
        return done.synchronize if done is not None else _nothing

    def _beside(self, copy: Callable[[], Any]) -> Any:
        """Run it on the stream of copies, after all that was asked for so far; its end."""
        assert self._stream is not None
        self._stream.wait_event(self._event())
        with self._module.stream(self._stream):
            copy()
            return self._event()

    def _event(self) -> Any:
        event = self._module.Event()
        event.record(self._module.current_stream(self.device))
        return event


def _nothing() -> None:
    pass


def _used_by(tensor: torch.Tensor, stream: Any) -> torch.Tensor:
    tensor.record_stream(stream)
    return tensor


class Shelf:
    """What passes between layers: kept here, or in host memory until it is its turn."""

    def __init__(self, device: torch.device, *, is_host: bool) -> None:
        self._copies = Copies(device) if is_host else None

    def put(self, tensor: torch.Tensor, *, is_next: bool = False) -> Shelved:
        """Keep it; with `is_next` it is used here before anything else is put."""
        if self._copies is None:
            return Shelved(tensor)
        host = self._copies.to_host(tensor)
        return Shelved(tensor if is_next else None, host, self._copies)

    def finish(self) -> None:
        """Nothing more is put in this step."""
        if self._copies is not None:
            self._copies.finish()


class Shelved:
    """One tensor on the shelf."""

    def __init__(
        self,
        tensor: torch.Tensor | None,
        host: torch.Tensor | None = None,
        copies: Copies | None = None,
    ) -> None:
        self._tensor, self._host, self._copies = tensor, host, copies
        self._arriving: Callable[[], torch.Tensor] | None = None

    def start(self) -> None:
        """It is needed soon."""
        if self._tensor is None and self._arriving is None:
            assert self._copies is not None
            assert self._host is not None
            self._arriving = self._copies.to_device(self._host)

    def get(self) -> torch.Tensor:
        """The tensor on the device; of one in host memory a copy."""
        self.start()
        tensor, arriving = self._tensor, self._arriving
        if self._copies is not None:
            self._tensor = self._arriving = None
        if tensor is None:
            assert arriving is not None
            tensor = arriving()
        return tensor
