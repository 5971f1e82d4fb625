"""The chance (dropout) of a layer and micro-batch: the same when the layer is computed again."""

from __future__ import annotations

from contextlib import AbstractContextManager

import torch


class Chance:
    """The generator of a rank's device, seeded for each use; others who draw are not disturbed."""

    def __init__(self, device: torch.device, *, seed: int, rank: int) -> None:
        self._device, self._seed, self._rank = device, seed, rank
        self._generator = _default_generator(device)
        self._step = 0

    def in_step(self, step: int) -> AbstractContextManager[None]:
        """Around a step; afterwards the generator is as it was."""
        self._step = step
        devices = [self._device] if self._device.type == "cuda" else []
        return torch.random.fork_rng(devices=devices)

    def begin(self, layer: int, index: int) -> None:
        """Before a layer (-1: what is before them) computes the micro-batch `index`."""
        key = ((self._seed * 1_000_003 + self._step) * 65_537 + layer + 1) * 8_191
        # `torch.manual_seed` looks for every kind of device, at 200 microseconds a call.
        self._generator.manual_seed((key + index * 4_099 + self._rank) % 2**63)


def _default_generator(device: torch.device) -> torch.Generator:
    """Where operations on that device take their chance from."""
    if device.type != "cuda":
        return torch.default_generator
    torch.cuda.init()
    index = torch.cuda.current_device() if device.index is None else device.index
    generator: torch.Generator = torch.cuda.default_generators[index]
    return generator
