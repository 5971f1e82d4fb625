"""Launchers of other tools in a job's command: torchrun and `accelerate launch`, taken off.

Drystone starts every rank itself, with torchrun's variables. A launcher in between would be started
once for each GPU, and would start all ranks each time.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, field
from pathlib import PurePath
from typing import Final

from drystone.errors import InvalidSpec

_PLAIN: Final = (
    "Drystone starts one process for each GPU, with torchrun's variables: "
    "write command: python train.py"
)


@dataclass(frozen=True, slots=True, kw_only=True)
class Launch:
    """What one rank runs, and how many ranks the launcher was told to start."""

    command: tuple[str, ...]
    environment: Mapping[str, str] = field(default_factory=dict)  # that the launcher would set
    min_ranks: int | None = None  # None: it does not say
    max_ranks: int | None = None


@dataclass(frozen=True, slots=True, kw_only=True)
class _Launcher:
    name: str
    valued: frozenset[str]  # options that take a value, which Drystone decides or keeps in its logs
    flags: frozenset[str]
    short: Mapping[str, str]
    hint: str  # for options that change what is trained


_TORCHRUN: Final = _Launcher(
    name="torchrun",
    valued=frozenset(
        {
            "nnodes",
            "nproc_per_node",
            "rdzv_backend",
            "rdzv_endpoint",
            "rdzv_id",
            "rdzv_conf",
            "max_restarts",
            "monitor_interval",
            "start_method",
            "event_log_handler",
            "role",
            "log_dir",
            "redirects",
            "tee",
            "local_ranks_filter",
            "duplicate_stdout_filters",
            "duplicate_stderr_filters",
            "node_rank",
            "master_addr",
            "master_port",
            "local_addr",
            "logs_specs",
            "signals_to_handle",
            "shutdown_timeout",
        }
    ),
    flags=frozenset({"standalone", "module", "no_python"}),
    short={"-m": "module", "-r": "redirects", "-t": "tee"},
    hint=_PLAIN,
)
_VARIABLES: Final = {  # that `accelerate launch` sets
    "cpu": "ACCELERATE_USE_CPU",
    "debug": "ACCELERATE_DEBUG_MODE",
    "mixed_precision": "ACCELERATE_MIXED_PRECISION",
    "num_cpu_threads_per_process": "OMP_NUM_THREADS",
}
_ACCELERATE: Final = _Launcher(
    name="accelerate launch",
    valued=frozenset(
        {
            "num_processes",
            "num_machines",
            "machine_rank",
            "main_process_ip",
            "main_process_port",
            "rdzv_backend",
            "rdzv_conf",
            "max_restarts",
            "monitor_interval",
            "role",
            "log_dir",
            "mixed_precision",
            "num_cpu_threads_per_process",
        }
    ),
    flags=frozenset(
        {
            "multi_gpu",
            "same_network",
            "quiet",
            "cpu",
            "debug",
            "module",
            "no_python",
        }
    ),
    short={"-m": "module", "-q": "quiet"},
    hint="Say it in the script (Accelerator takes plugins for FSDP and DeepSpeed), or set the "
    "variables that Accelerate reads in environment:",
)
_BY_PROGRAM: Final = {"torchrun": (_TORCHRUN, 1), "accelerate-launch": (_ACCELERATE, 1)}
_BY_MODULE: Final = {
    "torch.distributed.run": _TORCHRUN,
    "accelerate.commands.launch": _ACCELERATE,
}
_REFUSED: Final = ("deepspeed", "horovodrun", "mpirun", "mpiexec", "torch.distributed.launch")


def unwrap(words: tuple[str, ...], *, where: str = "") -> Launch:
    """The command of one rank, and what its launcher says of their number and surroundings."""
    if not words:
        return Launch(command=())
    program, folder = PurePath(words[0]).name, PurePath(words[0]).parent
    module = words[2] if len(words) > 2 and words[1] == "-m" else ""
    is_python = program.startswith("python")
    name = module if is_python and module else program
    if name in _REFUSED:
        raise InvalidSpec(f"{name} would start all ranks on each GPU", where=where, hint=_PLAIN)
    if is_python and module in _BY_MODULE:
        launcher, num_words, python = _BY_MODULE[module], 3, words[0]
    elif program in _BY_PROGRAM or (program == "accelerate" and words[1:2] == ("launch",)):
        launcher, num_words = _BY_PROGRAM.get(program, (_ACCELERATE, 2))
        python = str(folder / "python")  # the one beside it, or that of the PATH
    else:
        return Launch(command=words)
    options, rest = _read_options(words[num_words:], launcher, where)
    min_ranks, max_ranks = _num_ranks(options, launcher, where)
    if "no_python" not in options:
        rest = (python, *(("-m",) if "module" in options else ()), *rest)
    environment = {
        variable: options[name] for name, variable in _VARIABLES.items() if name in options
    }
    return Launch(command=rest, environment=environment, min_ranks=min_ranks, max_ranks=max_ranks)


def _read_options(
    words: tuple[str, ...], launcher: _Launcher, where: str
) -> tuple[dict[str, str], tuple[str, ...]]:
    """The launcher's options by name, and the script with its own arguments."""
    options: dict[str, str] = {}
    left = list(words)
    while left and left[0].startswith("-"):
        word = left.pop(0)
        given, _, value = word.partition("=")
        if not word.startswith("--"):
            given, value = word[:2], word[2:].removeprefix("=")  # -t3
        name = launcher.short.get(given, given.removeprefix("--").replace("-", "_"))
        if name in launcher.flags and not value:
            options[name] = "true"
        elif name in launcher.valued and (value or left):
            options[name] = value or left.pop(0)
        else:
            raise InvalidSpec(
                f"{given} of {launcher.name} is not taken over", where=where, hint=launcher.hint
            )
    if not left:
        raise InvalidSpec(f"{launcher.name} is given no script", where=where, hint=_PLAIN)
    return options, tuple(left)


def _num_ranks(
    options: Mapping[str, str], launcher: _Launcher, where: str
) -> tuple[int | None, int | None]:
    """How many ranks it would start, at least and at most; None where it takes what is there."""
    if launcher is _TORCHRUN:
        ranks, nodes = options.get("nproc_per_node", "1"), options.get("nnodes", "1")
    else:
        ranks, nodes = options.get("num_processes", "auto"), "1"  # of all machines together
    if ranks in ("gpu", "cpu", "auto", "xpu"):
        return None, None
    fewest, _, most = nodes.partition(":")
    try:
        found = int(fewest) * int(ranks), int(most or fewest) * int(ranks)
    except ValueError:
        found = 0, 0
    if not 1 <= found[0] <= found[1] <= 10**6:
        raise InvalidSpec(
            f"{launcher.name} cannot start {ranks} processes on {nodes} nodes",
            where=where,
            hint="Leave them out and write gpus: {min: 1, max: 8}",
        )
    return found
