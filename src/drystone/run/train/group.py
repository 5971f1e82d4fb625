"""Join the other ranks, and leave them: by the environment that torchrun and the engines set."""

from __future__ import annotations

import os
import sys
import traceback
from collections.abc import Iterator
from contextlib import contextmanager
from datetime import timedelta
from typing import NoReturn

import torch
import torch.distributed as dist

from drystone.errors import DrystoneError, InvalidSpec
from drystone.run.train.collectives import Wire, ends_within
from drystone.run.train.config import TIMEOUT_SECONDS
from drystone.run.train.step_report import write_event

OUT_OF_MEMORY_EXIT_CODE = 12  # as errno has ENOMEM; the exit code of a rank that ran out of it


@contextmanager
def joined(*, timeout_seconds: float = TIMEOUT_SECONDS) -> Iterator[Wire]:
    """The group of all ranks: RANK, WORLD_SIZE, MASTER_ADDR, MASTER_PORT; alone without them."""
    if "WORLD_SIZE" not in os.environ:
        try:
            yield Wire()
        except torch.OutOfMemoryError as error:
            _tell_out_of_memory(error)
            raise SystemExit(OUT_OF_MEMORY_EXIT_CODE) from error
        return
    device = this_device()
    if device.type == "cuda":
        torch.cuda.set_device(device)
    else:
        torch.set_num_threads(int(os.environ.get("OMP_NUM_THREADS", "1")))
    timeout = timedelta(seconds=timeout_seconds)
    try:
        with ends_within(timeout):
            dist.init_process_group("nccl" if device.type == "cuda" else "gloo", timeout=timeout)
        yield Wire(timeout=timeout)
        dist.barrier()
        dist.destroy_process_group()
    except BaseException as error:
        _leave_at_once(error)


def this_device() -> torch.device:
    """The GPU of this rank on its machine, or the processor."""
    if not torch.cuda.is_available():
        return torch.device("cpu")
    index = int(os.environ.get("LOCAL_RANK", "0"))
    if index >= torch.cuda.device_count():
        raise InvalidSpec(f"LOCAL_RANK {index}, but {torch.cuda.device_count()} GPUs are here")
    return torch.device("cuda", index)


def _leave_at_once(error: BaseException) -> NoReturn:
    """A rank that failed ends its process: an orderly exit would hang on pending collectives."""
    exit_code = 1
    if isinstance(error, DrystoneError):
        sys.stderr.write(f"{error}\n")
        exit_code = error.exit_code
    elif isinstance(error, torch.OutOfMemoryError):
        _tell_out_of_memory(error)
        exit_code = OUT_OF_MEMORY_EXIT_CODE
    else:
        traceback.print_exception(error)
    sys.stdout.flush()
    sys.stderr.flush()
    os._exit(exit_code)


def _tell_out_of_memory(error: torch.OutOfMemoryError) -> None:
    """One line of JSON on standard output, from whichever rank it was, and the message."""
    numbers = {
        name: getattr(error, name)
        for name in ("asked_bytes", "live_bytes", "cap_bytes")
        if hasattr(error, name)
    }
    rank = int(os.environ.get("RANK", "0"))
    write_event(sys.stdout, "out_of_memory", rank=rank, message=str(error), **numbers)
    sys.stderr.write(f"rank {rank}: {error}\n")
