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
from drystone.run.runtime.collectives import Wire

DEFAULT_TIMEOUT_SECONDS = 300.0


@contextmanager
def joined(*, timeout_seconds: float = DEFAULT_TIMEOUT_SECONDS) -> Iterator[Wire]:
    """The group of all ranks: RANK, WORLD_SIZE, MASTER_ADDR, MASTER_PORT; alone without them."""
    if "WORLD_SIZE" not in os.environ:
        yield Wire()
        return
    device = this_device()
    if device.type == "cuda":
        torch.cuda.set_device(device)
    else:
        torch.set_num_threads(int(os.environ.get("OMP_NUM_THREADS", "1")))
    dist.init_process_group(
        "nccl" if device.type == "cuda" else "gloo",
        timeout=timedelta(seconds=timeout_seconds),
    )
    try:
        yield Wire()
    except BaseException as error:
        _leave_at_once(error)
    dist.barrier()
    dist.destroy_process_group()


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
    if isinstance(error, DrystoneError):
        sys.stderr.write(f"{error}\n")
    else:
        traceback.print_exception(error)
    sys.stdout.flush()
    sys.stderr.flush()
    os._exit(error.exit_code if isinstance(error, DrystoneError) else 1)
