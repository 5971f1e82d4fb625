"""Start a few processes that talk over gloo, run a function in each, and collect what they return.

They are forked from a server that has imported torch once, which costs more than most tests do.
"""

import multiprocessing
import os
import tempfile
import traceback
from collections.abc import Callable
from datetime import timedelta
from pathlib import Path
from typing import Any

import nccl_rules
import pytest
import torch
import torch.distributed as dist
import torch.multiprocessing as mp

SECONDS = 90
ON_GPUS = os.environ.get("DRYSTONE_TEST_DEVICE") == "cuda"
START_METHOD = "forkserver"  # whoever starts processes so has what is imported below

multiprocessing.set_forkserver_preload(
    [
        "torch",
        "torch._dynamo",  # each rank would import it when it builds its model: seconds
        "torch.distributed.checkpoint",
        "torch.distributed.tensor",
        "numpy.random",
        "drystone.run.train.__main__",
    ]
)


def run_ranks(
    function: Callable[..., Any], num_ranks: int, *args: Any, backend: str = "gloo"
) -> list[Any]:
    """What `function(*args)` returns on each rank; it must live in an importable module.

    On GPUs (`pytest --device cuda`) what would go over gloo goes over NCCL, a GPU for each rank.
    """
    if ON_GPUS and backend == "gloo":
        backend = "nccl"
        if torch.cuda.device_count() < num_ranks:
            pytest.skip(f"left out: {num_ranks} GPUs are needed, {torch.cuda.device_count()} here")
    with tempfile.TemporaryDirectory() as folder:
        mp.start_processes(
            _enter,
            args=(num_ranks, folder, function, args, backend),
            nprocs=num_ranks,
            start_method=START_METHOD,
        )
        return [
            torch.load(Path(folder) / f"{rank}.pt", weights_only=False) for rank in range(num_ranks)
        ]


def _enter(
    rank: int,
    num_ranks: int,
    folder: str,
    function: Callable[..., Any],
    args: tuple,
    backend: str,
):
    nccl_rules.register(timedelta(seconds=SECONDS))
    os.environ["OMP_NUM_THREADS"] = "1"
    torch.set_num_threads(1)
    if backend == "nccl":
        os.environ["LOCAL_RANK"] = str(rank)
        torch.cuda.set_device(rank)
    dist.init_process_group(
        backend,
        init_method=f"file://{folder}/store",
        rank=rank,
        world_size=num_ranks,
        timeout=timedelta(seconds=SECONDS),
    )
    try:
        torch.save(function(*args), Path(folder) / f"{rank}.pt")
        dist.barrier()
        dist.destroy_process_group()
    except BaseException:
        # A normal exit would hang on what the others still wait for.
        traceback.print_exc()
        os._exit(1)
