"""Checkpoints that are written while training goes on.

`save` copies this rank's pieces into pinned host memory, in the order of the device's own work; a
thread waits for that and writes the copy, with collectives over a group of its own. One checkpoint
is under way at a time: the next `save` waits for the one before. It is a checkpoint only once the
folder has its name, as always, so a kill in the middle leaves the one before as the newest.
"""

from __future__ import annotations

import threading
from collections.abc import Callable
from pathlib import Path

import torch

from drystone.run.train.checkpoint.checkpoint import (
    Progress,
    checkpoint_state,
    make_optimizer_state,
    write_checkpoint,
)
from drystone.run.train.checkpoint.slices import Slice
from drystone.run.train.device import Copies, use_device
from drystone.run.train.emulate import host_memory
from drystone.run.train.stepping import Stepper


class BackgroundSaves:
    """Writes checkpoints of one job; every rank calls in the same order."""

    def __init__(
        self, folder: Path, engine: Stepper, optimizer: torch.optim.Optimizer, *, keep: int = 3
    ) -> None:
        self._folder, self._engine, self._optimizer, self._keep = folder, engine, optimizer, keep
        # A group apart: collectives of two threads on one would meet the wrong partners.
        self._wire = engine.wire.for_storage()
        self._memory = Copies(engine.device)
        self._copies: dict[str, torch.Tensor] = {}
        self._thread: threading.Thread | None = None
        self._error: BaseException | None = None
        self._whole: list[tuple[int, Path]] = []

    def save(self, progress: Progress) -> None:
        """Copy, and write the copy while the caller goes on."""
        self.wait()
        state, is_copied = self._copied(), self._memory.mark()
        self._thread = threading.Thread(
            target=self._write, args=(state, progress, is_copied), name="checkpoint", daemon=True
        )
        self._thread.start()

    def wait(self) -> None:
        """Until the last one is whole; what went wrong with it is raised here."""
        if self._thread is not None:
            self._thread.join()
            self._thread = None
        if self._error is not None:
            error, self._error = self._error, None
            raise error

    def take_whole(self) -> list[tuple[int, Path]]:
        """Step and folder of the checkpoints that became whole since the last call."""
        whole, self._whole = self._whole, []
        return whole

    def _copied(self) -> dict[str, torch.Tensor]:
        """The rank's state in host memory; the memory is used again the next time."""
        if not self._optimizer.state:
            make_optimizer_state(self._optimizer)
        state: dict[str, torch.Tensor] = {}
        with host_memory(), torch.no_grad():
            for name, one in checkpoint_state(self._engine.counted, self._optimizer):
                source = one.local if isinstance(one, Slice) else one
                copy = self._copies.get(name)
                if copy is None or copy.shape != source.shape:
                    copy = self._copies[name] = self._memory.host_like(source)
                # In the order of the device's own work: what changes the source comes later.
                copy.copy_(source, non_blocking=True)
                state[name] = one.with_values(copy) if isinstance(one, Slice) else copy
        return state

    def _write(
        self, state: dict[str, torch.Tensor], progress: Progress, is_copied: Callable[[], None]
    ) -> None:
        try:
            use_device(self._engine.device)  # else a thread is on the first one
            is_copied()
            path = write_checkpoint(self._folder, state, progress, wire=self._wire, keep=self._keep)
            self._whole.append((progress.step, path))
        except BaseException as error:  # raised where somebody waits for it
            self._error = error
