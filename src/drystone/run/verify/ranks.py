"""Ranks of a trial on this machine: started, listened to, killed, and what became of them."""

from __future__ import annotations

import json
import os
import socket
import subprocess
import sys
import time
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any, Final

from drystone.plan.plan import Plan

_PATIENCE_SECONDS: Final = 180.0  # without a sign of life
_POLL_SECONDS: Final = 0.05


@dataclass(frozen=True, slots=True, kw_only=True)
class Devices:
    """What the ranks run on: GPUs by type and driver number, or nothing but the processor."""

    numbers: Mapping[str, Sequence[int]]  # of each GPU type, as the driver counts
    is_emulated: bool

    def of_ranks(self, gpus: Sequence[str]) -> list[str]:
        """CUDA_VISIBLE_DEVICES of each rank, given the GPU type of each."""
        if self.is_emulated:
            return [""] * len(gpus)
        left = {gpu: list(numbers) for gpu, numbers in self.numbers.items()}
        return [str(left[gpu].pop(0)) for gpu in gpus]


@dataclass(frozen=True, slots=True, kw_only=True)
class Ended:
    """How the ranks ended."""

    exit_codes: tuple[int, ...]
    is_hung: bool
    message: str  # the last line that the rank to blame wrote

    @property
    def is_well(self) -> bool:
        """Whether all of them did what they were asked."""
        return not any(self.exit_codes) and not self.is_hung


def rank_gpus(plan: Plan) -> tuple[str, ...]:
    """The GPU type of every rank of a plan, in order."""
    return tuple(
        share.gpu for stage in plan.stages for share in stage.ranks for _ in range(share.count)
    )


def run_ranks(
    arguments: Sequence[str],
    gpus: Sequence[str],
    devices: Devices,
    folder: Path,
    *,
    watch: Callable[[list[subprocess.Popen[bytes]]], None] | None = None,
) -> Ended:
    """Start `python -m` with these arguments once a rank, and wait until all have ended.

    `watch` is called again and again with the processes. Ranks that write nothing for long hang.
    """
    folder.mkdir(parents=True, exist_ok=True)
    visible = devices.of_ranks(gpus)
    port = _free_port()
    processes, files = [], []
    for rank in range(len(gpus)):
        out, err = folder / f"rank-{rank}.out", folder / f"rank-{rank}.err"
        files += [out, err]
        environment = {
            **os.environ,
            "RANK": str(rank),
            "WORLD_SIZE": str(len(gpus)),
            "LOCAL_RANK": "0",
            "MASTER_ADDR": "127.0.0.1",
            "MASTER_PORT": str(port),
            "OMP_NUM_THREADS": "1",
        }
        if not devices.is_emulated:
            environment["CUDA_VISIBLE_DEVICES"] = visible[rank]
        with out.open("wb") as to_out, err.open("wb") as to_err:
            processes.append(
                subprocess.Popen(
                    [sys.executable, "-P", "-m", *arguments],
                    env=environment,
                    stdout=to_out,
                    stderr=to_err,
                )
            )
    try:
        is_hung = _wait(processes, [folder, *files], watch)
    finally:
        for process in processes:
            process.kill()
            process.wait()
    codes = tuple(process.returncode for process in processes)
    return Ended(exit_codes=codes, is_hung=is_hung, message=_last_words(codes, folder))


def _wait(
    processes: list[subprocess.Popen[bytes]],
    signs: Sequence[Path],
    watch: Callable[[list[subprocess.Popen[bytes]]], None] | None,
) -> bool:
    """Until all have ended; true where they hung, or one failed and the others stayed."""
    heard, sign, failed_at = time.monotonic(), _sign(signs), 0.0
    while any(process.poll() is None for process in processes):
        if watch is not None:
            watch(processes)
        now = time.monotonic()
        if (new := _sign(signs)) != sign:
            heard, sign = now, new
        if any(process.poll() for process in processes):
            failed_at = failed_at or now
        if failed_at and now - failed_at > _PATIENCE_SECONDS / 3:
            return False  # those that are left wait for one that has gone: not their fault
        if now - heard > _PATIENCE_SECONDS:
            return True
        time.sleep(_POLL_SECONDS)
    return False


def _sign(paths: Sequence[Path]) -> float:
    """Changes whenever something was written."""
    newest = 0.0
    for path in paths:
        found = path.iterdir() if path.is_dir() else [path]
        for file in found:
            newest = max(newest, file.stat().st_mtime)
    return newest


def _last_words(codes: Sequence[int], folder: Path) -> str:
    """Of the first rank that failed with something to say."""
    for rank, code in enumerate(codes):
        if code > 0:
            lines = (folder / f"rank-{rank}.err").read_text(errors="replace").split("\n")
            told = [line.strip() for line in lines if line.strip()]
            if told:
                return f"rank {rank}: {told[-1][:300]}"
    return ""


def read_reports(path: Path) -> list[dict[str, Any]]:
    """Lines of JSON that a rank wrote; a line cut off at the end is not there yet."""
    if not path.exists():
        return []
    reports = []
    for line in path.read_text(errors="replace").split("\n")[:-1]:
        if line.startswith("{"):
            reports.append(json.loads(line))
    return reports


def losses_of(reports: Sequence[Mapping[str, Any]]) -> dict[int, float]:
    """Loss by step; of a step that was done again the last one counts."""
    return {int(r["step"]): float(r["loss"]) for r in reports if r.get("event") == "step"}


def _free_port() -> int:
    with socket.socket() as listener:
        listener.bind(("127.0.0.1", 0))
        port: int = listener.getsockname()[1]
        return port
