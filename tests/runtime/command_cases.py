"""Plans for the runtime's command, and processes that execute them."""

import json
import multiprocessing
import os
import socket
import subprocess
import sys
import time
from collections.abc import Callable
from multiprocessing.process import BaseProcess
from pathlib import Path

import ranks as server  # noqa: F401  # it says what the server imports first
from engine_cases import a_spec

from drystone.describe.recipe import Precision, Recipe
from drystone.plan.plan import Plan, RankShare, StagePlan, Way
from drystone.run.train.__main__ import main


def a_plan(shares: list[tuple[int, int, float]], **recipe) -> Plan:
    """Ranks as (batch, micro-batch, state share)."""
    ranks = tuple(
        RankShare(
            gpu="A100-80G",
            count=1,
            batch=batch,
            micro_batch=micro,
            num_micro_batches=-(-batch // micro) if micro else 0,
            state_share=share,
        )
        for batch, micro, share in shares
    )
    given = {"precision": Precision.FP32, "global_batch": sum(one[0] for one in shares), **recipe}
    return Plan(
        way=Way.UNEVEN,
        model=a_spec("llama", tied=False),
        recipe=Recipe(seq_len=12, **given),
        stages=(StagePlan(first_layer=0, end_layer=3, ranks=ranks),),
        needs=(),
        step_seconds=1.0,
        time_items={},
    )


def start(arguments: list[str], num_ranks: int) -> list[subprocess.Popen]:
    shared = rendezvous(num_ranks)
    return [
        subprocess.Popen(
            [sys.executable, *arguments],
            env={**os.environ, **shared, "RANK": str(rank), "OMP_NUM_THREADS": "1"},
            stdout=subprocess.PIPE,
            stderr=subprocess.PIPE,
            text=True,
        )
        for rank in range(num_ranks)
    ]


def rendezvous(num_ranks: int) -> dict[str, str]:
    with socket.socket() as probe:
        probe.bind(("127.0.0.1", 0))
        port = probe.getsockname()[1]
    return {"WORLD_SIZE": str(num_ranks), "MASTER_ADDR": "127.0.0.1", "MASTER_PORT": str(port)}


def fork(arguments: list[str], num_ranks: int, folder: Path, **more: str) -> list[BaseProcess]:
    """The runtime's command in processes that need not import torch; output in `folder`."""
    shared = {**rendezvous(num_ranks), "OMP_NUM_THREADS": "1", **more}
    context = multiprocessing.get_context("forkserver")
    processes = [
        context.Process(
            target=_run_command,
            args=(arguments, {**shared, "RANK": str(rank)}, str(folder / f"{rank}.out")),
        )
        for rank in range(num_ranks)
    ]
    for process in processes:
        process.start()
    return processes


def _run_command(arguments: list[str], environment: dict[str, str], output: str) -> None:
    os.environ |= environment
    for number, path in ((1, output), (2, f"{output}.err")):
        os.dup2(os.open(path, os.O_WRONLY | os.O_CREAT | os.O_TRUNC), number)
    sys.stdout, sys.stderr = os.fdopen(1, "w"), os.fdopen(2, "w")
    sys.exit(main(arguments))


def join(processes: list[BaseProcess], *, seconds: float = 120) -> list[int]:
    """Exit codes; nobody may take longer."""
    for process in processes:
        process.join(seconds)
        assert process.exitcode is not None, f"a rank still runs after {seconds} s"
    return [process.exitcode for process in processes]


def run_forked(arguments: list[str], num_ranks: int, folder: Path) -> list[dict]:
    """What the first rank reports of a command that all of them end well."""
    assert join(fork(arguments, num_ranks, folder)) == [0] * num_ranks
    return events((folder / "0.out").read_text())


def wait_for_events(
    processes: list[BaseProcess], folder: Path, is_enough: Callable[[list[dict]], bool]
) -> None:
    """Until the first rank has reported enough; nobody may have ended before."""
    until, output = time.monotonic() + 120, folder / "0.out"
    while True:
        text = output.read_text() if output.exists() else ""
        if is_enough(events(text[: text.rfind("\n") + 1])):
            return
        assert time.monotonic() < until, text
        assert all(one.exitcode is None for one in processes), text
        time.sleep(0.01)


def finish(processes: list[subprocess.Popen]) -> list[str]:
    """Standard output of every rank; all must have ended well."""
    outputs = [process.communicate(timeout=120) for process in processes]
    for process, (_, errors) in zip(processes, outputs, strict=True):
        assert process.returncode == 0, errors
    return [out for out, _ in outputs]


def events(text: str) -> list[dict]:
    return [json.loads(line) for line in text.splitlines()]
