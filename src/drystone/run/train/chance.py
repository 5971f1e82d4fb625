"""The chance (dropout) of a layer and micro-batch: the same when the layer is computed again."""

from __future__ import annotations

from contextlib import AbstractContextManager
from typing import Any

import torch

from drystone.run.train.device import is_accelerator


class Chance:
    """The generator of a rank's device, seeded for each use; others who draw are not disturbed."""

    def __init__(self, device: torch.device, *, seed: int, rank: int) -> None:
        self._device, self._seed, self._rank = device, seed, rank
        self._generator = _default_generator(device)
        self._step = 0

    def in_step(self, step: int) -> AbstractContextManager[None]:
        """Around a step; afterwards the generator is as it was."""
        self._step = step
        if not is_accelerator(self._device):
            return torch.random.fork_rng(devices=[])
        return torch.random.fork_rng(devices=[self._device], device_type=self._device.type)

    def begin(self, layer: int, index: int) -> None:
        """Before a layer (-1: what is before them) computes the micro-batch `index`."""
        key = ((self._seed * 1_000_003 + self._step) * 65_537 + layer + 1) * 8_191
        # `torch.manual_seed` looks for every kind of device, at 200 microseconds a call.
        self._generator.manual_seed((key + index * 4_099 + self._rank) % 2**63)


def _default_generator(device: torch.device) -> torch.Generator:
    """Where operations on that device take their chance from."""
    if not is_accelerator(device):
        return torch.default_generator
    module: Any = torch.get_device_module(device)
    module.init()
    index = module.current_device() if device.index is None else device.index
    generator: torch.Generator = module.default_generators[index]
    return generator
