"""The contract between Drystone and a training script of your own: progress, saving, leaving.

    from drystone import contract

    job = contract.join()                    # who am I, how many steps, where do checkpoints go
    for step in range(...):
        ...
        if job.tell(step, loss=loss):        # True: save, and leave
            break

Without Drystone the same script runs alone, and nobody is told. Only the standard library is
imported; where the script itself uses `torch.distributed`, ranks agree over it.
"""

from __future__ import annotations

import json
import os
import shutil
import signal
import sys
import time
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any, Final, NamedTuple

from drystone.run.fence import check_lease, writing

_MARK: Final = "drystone.json"  # in a checkpoint that is whole


class Saved(NamedTuple):
    """A checkpoint that is whole."""

    path: Path
    step: int


class Contract:
    """What one process of a job knows of it, and what it tells."""

    def __init__(self, num_steps: int, folder: Path) -> None:
        self.rank = int(os.environ.get("RANK", "0"))
        self.num_ranks = int(os.environ.get("WORLD_SIZE", "1"))
        self.num_steps = num_steps  # in all, those before a restart included
        self.folder = folder  # it stays: save there, resume from there
        self.was_asked_to_leave = False  # this process; others may hear of it a moment later
        self._progress = os.environ.get("DRYSTONE_PROGRESS", "")
        self._last: tuple[int, float] | None = None  # step, and when it was told

    def tell(self, step: int, *, loss: float | None = None, is_last: bool = False) -> bool:
        """Tell that a step is done; True on all ranks where they are to save and leave.

        Every rank calls it after the same steps. `is_last` says that training ends here although
        steps are left. Raises `drystone.run.fence.Fenced` in a process that was given up.
        """
        check_lease()
        now = time.monotonic()
        report: dict[str, Any] = {"event": "step", "step": step}
        if loss is not None:
            report["loss"] = float(loss)
        if self._last is None:
            self._report({"event": "started", "step": step - 1})
        elif step > self._last[0]:
            report["step_seconds"] = (now - self._last[1]) / (step - self._last[0])
        self._last = step, now
        self._report(report)
        if is_last:
            self._report({"event": "finished", "step": step})
        return _is_true_anywhere(self.was_asked_to_leave)

    def newest(self) -> Saved | None:
        """The newest checkpoint that is whole; None where training begins."""
        found = []
        for mark in self.folder.glob(f"*/{_MARK}"):
            try:
                found.append(Saved(mark.parent, int(json.loads(mark.read_text())["step"])))
            except (OSError, ValueError, KeyError, TypeError):
                continue  # another process removes it
        return max(found, key=lambda saved: saved.step, default=None)

    def mark(self, path: Path | str, step: int) -> None:
        """Say that the checkpoint in this folder is whole. Rank 0 does it; others need not."""
        if self.rank:
            return
        with writing():  # unless a later launch of the job has begun
            scratch = Path(path) / f".{_MARK}"
            scratch.write_text(json.dumps({"step": step}), encoding="utf-8")
            scratch.replace(Path(path) / _MARK)
        self._report({"event": "checkpoint", "step": step})

    @contextmanager
    def saving(self, step: int, *, keep: int = 2) -> Iterator[Path]:
        """A folder in which all ranks write their part; it counts once all of them have left."""
        path = self.folder / f"step-{step:08d}"
        path.mkdir(parents=True, exist_ok=True)
        yield path
        _wait_for_all()
        self.mark(path, step)
        if self.rank == 0:
            older = sorted(self.folder.glob(f"step-*/{_MARK}"), reverse=True)[keep:]
            for mark in older:
                mark.unlink()  # first, so that nobody resumes from half of it
                shutil.rmtree(mark.parent, ignore_errors=True)
        _wait_for_all()

    def _report(self, table: dict[str, Any]) -> None:
        if self.rank == 0 and self._progress:
            with open(self._progress, "a", encoding="utf-8") as file:
                file.write(json.dumps(table) + "\n")

    def _leave(self, *_: object) -> None:
        self.was_asked_to_leave = True


def join(*, num_steps: int = 10, folder: Path | str = "checkpoints") -> Contract:
    """The job that this process belongs to; the arguments count where nobody launched it.

    From here on SIGTERM does not end the process but makes `tell` return True.
    """
    given = os.environ.get("DRYSTONE_STEPS")
    where = Path(os.environ.get("DRYSTONE_CHECKPOINTS") or folder)
    where.mkdir(parents=True, exist_ok=True)
    found = Contract(int(given) if given else num_steps, where)
    signal.signal(signal.SIGTERM, found._leave)
    return found


def _distributed() -> Any:
    """`torch.distributed`, where the script has joined a group with it; None elsewhere."""
    module = sys.modules.get("torch.distributed")
    if module is None or not module.is_available() or not module.is_initialized():
        return None
    return module


def _is_true_anywhere(flag: bool) -> bool:
    """Whether it is true on any rank: a signal reaches them one after another."""
    distributed = _distributed()
    if distributed is None:
        return flag
    torch = sys.modules["torch"]
    has_cpu = any(name in distributed.get_backend() for name in ("gloo", "mpi"))
    device = "cpu" if has_cpu else torch.accelerator.current_accelerator()
    told = torch.tensor(int(flag), device=device)
    distributed.all_reduce(told, op=distributed.ReduceOp.MAX)
    return bool(told.item())


def _wait_for_all() -> None:
    distributed = _distributed()
    if distributed is not None:
        distributed.barrier()
