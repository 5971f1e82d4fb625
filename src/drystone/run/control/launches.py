"""From a decision to processes: which rank goes where, with which variables and arguments.

Whatever is started gets torchrun's variables (RANK, WORLD_SIZE, LOCAL_RANK, MASTER_ADDR ...) and:

DRYSTONE_JOB, DRYSTONE_EPOCH      the job, and which launch of it this is
DRYSTONE_PLAN                     the plan as a file, where the model is known
DRYSTONE_STEPS                    optimizer steps in all, those before a restart included
DRYSTONE_CHECKPOINTS              a folder that stays: save there, resume from there
DRYSTONE_PROGRESS                 append one JSON object a line: {"event": "step", "step": 7, ...}
"""

from __future__ import annotations

import os
from collections import Counter
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any, Final

from drystone.describe.files.cluster import ClusterSpec
from drystone.describe.job import TrainingJob, count_steps
from drystone.errors import InvalidSpec
from drystone.plan.plan import Plan, save_plan
from drystone.run.control.emulation import emulation
from drystone.run.control.journal import Journal
from drystone.run.engines.agent.accounts import account_name, find_account, hand_over
from drystone.run.engines.agent.launches import PYTHON, read_json, write_whole
from drystone.run.engines.contract import Engine, Rendezvous, Seen
from drystone.run.state import JobRecord
from drystone.run.succession import STANDBY_VARIABLE

COLLECTIVE_TIMEOUT_SECONDS: Final = 120.0
MIN_STEPS_TO_TRY: Final = 1000  # left to a job before other plans are tried: some 20 steps more


@dataclass(frozen=True, slots=True, kw_only=True)
class Seat:
    """Where one rank runs."""

    node: str
    gpu: str
    device: int


@dataclass(frozen=True, slots=True, kw_only=True)
class LaunchOrder:
    """One launch: what each agent is asked to start. It is a file, so that it is ordered once."""

    job_id: str
    epoch: int
    plan: str  # in a few words
    seats: tuple[Seat, ...]  # by rank
    requests: Mapping[str, dict[str, Any]]  # by node
    done_steps: int = 0  # how far the job had come before
    replaces: int = 0  # the launch that goes on until this one takes over; 0: none

    def save(self, path: Path) -> None:
        """Write it, whole or not at all."""
        write_whole(
            path,
            {
                "job_id": self.job_id,
                "epoch": self.epoch,
                "plan": self.plan,
                "seats": [[seat.node, seat.gpu, seat.device] for seat in self.seats],
                "requests": dict(self.requests),
                "done_steps": self.done_steps,
                "replaces": self.replaces,
            },
        )


def load_order(path: Path) -> LaunchOrder | None:
    """What was ordered before; None where nothing was."""
    table = read_json(path)
    if table is None:
        return None
    return LaunchOrder(
        job_id=table["job_id"],
        epoch=table["epoch"],
        plan=table["plan"],
        seats=tuple(Seat(node=node, gpu=gpu, device=dev) for node, gpu, dev in table["seats"]),
        requests=table["requests"],
        done_steps=table.get("done_steps", 0),
        replaces=table.get("replaces", 0),
    )


def check_checkpoints(folder: Path, record: JobRecord, launched_epoch: int) -> None:
    """Refuse to start a job again whose folder of checkpoints was there and is not any more."""
    is_begun = launched_epoch > 0 and record.done_samples > 0
    if is_begun and not (folder / "checkpoints").exists():
        step = int(record.done_samples // record.spec.global_batch)
        raise InvalidSpec(
            f"the folder of its checkpoints is gone, and with it {step} steps: "
            f"{folder / 'checkpoints'}",
            hint="Bring it back and submit the job again with it, or submit it to begin anew",
        )


def take_seats(
    wanted: Sequence[tuple[str, str, int]], busy: Mapping[str, set[int]], sizes: Mapping[str, int]
) -> list[Seat] | None:
    """Free devices for (node, GPU type, how many); None while somebody still sits there."""
    seats = []
    for node, gpu, count in wanted:
        free = [device for device in range(sizes[node]) if device not in busy.get(node, set())]
        if len(free) < count:
            return None
        seats += [Seat(node=node, gpu=gpu, device=device) for device in free[:count]]
    return seats


def seat_ranks(seats: Sequence[Seat], plan: Plan | None) -> list[Seat]:
    """The seats in the order of the plan's ranks."""
    if plan is None:
        return list(seats)
    by_gpu: dict[str, list[Seat]] = {}
    for seat in seats:
        by_gpu.setdefault(seat.gpu, []).append(seat)
    for mine in by_gpu.values():  # fuller nodes first: tensor-parallel ranks stay in one
        shares = Counter(seat.node for seat in mine)
        mine.sort(key=lambda seat: -shares[seat.node])
    return [
        by_gpu[share.gpu].pop(0)
        for stage in plan.stages
        for share in stage.ranks
        for _ in range(share.count)
    ]


def make_order(
    job: TrainingJob,
    *,
    job_id: str,
    epoch: int,
    num_steps: int,
    plan: Plan | None,
    seats: Sequence[Seat],
    rendezvous: Rendezvous,
    cluster: ClusterSpec,
    folder: Path,
    lease_seconds: float,
    owner_variables: Mapping[str, str] | None = None,
    run_as: str = "",
    replaces: int = 0,
    rivals: Sequence[Plan] = (),
) -> LaunchOrder:
    """What each node's agent is to start. Writes the plan beside the job's checkpoints."""
    checkpoints, home = folder / "checkpoints", folder / f"epoch-{epoch}"
    for path in (checkpoints, home):
        path.mkdir(parents=True, exist_ok=True)
    given = {**(owner_variables or {}), **dict(job.environment)}
    variables = {
        "PYTHONUNBUFFERED": "1",
        **given,
        "DRYSTONE_JOB": job_id,
        "DRYSTONE_STEPS": str(num_steps),
        "DRYSTONE_CHECKPOINTS": str(checkpoints),
        "DRYSTONE_PROGRESS": str(home / "progress.jsonl"),
        "MASTER_ADDR": rendezvous.address,
        "MASTER_PORT": str(rendezvous.port),
        "WORLD_SIZE": str(len(seats)),
        "PYTHONPATH": _python_path(job.command, given),
    }
    if replaces:
        variables[STANDBY_VARIABLE] = str(replaces)
    if plan is not None:
        save_plan(plan, home / "plan.json")
        variables["DRYSTONE_PLAN"] = str(home / "plan.json")
    if cluster.is_emulated:
        variables |= emulation(plan, cluster)
    if rivals:
        _save_rivals(home / "rivals", rivals, cluster)
    arguments = (
        _own_command(job.command, given)
        if job.is_command
        else _runtime_arguments(job, home / "plan.json", plan, num_steps, checkpoints)
    )
    arguments += ["--rivals", str(home / "rivals")] if rivals else []
    work = job.folder if job.is_command else str(folder)
    account = account_name(run_as, job.owner)
    if account:
        hand_over(folder, home, Path(work), find_account(account))
    common = {
        "job_id": job_id,
        "epoch": epoch,
        "arguments": arguments,
        "folder": work,
        "account": account,
        "environment": variables,
        "fence": str(folder / "epoch"),
        "lease_seconds": lease_seconds,
        "is_command": job.is_command,
        "is_standby": bool(replaces),
    }
    return LaunchOrder(
        job_id=job_id,
        epoch=epoch,
        plan=describe_plan(plan, seats),
        seats=tuple(seats),
        requests=_by_node(common, seats, cluster),
        replaces=replaces,
    )


def _save_rivals(folder: Path, rivals: Sequence[Plan], cluster: ClusterSpec) -> None:
    """Plans that the ranks try, each with the pace of emulated devices under it."""
    folder.mkdir(exist_ok=True)
    for number, rival in enumerate(rivals, start=1):
        save_plan(rival, folder / f"{number}.json")
        if cluster.is_emulated:
            pace = emulation(rival, cluster)["DRYSTONE_EMULATE"]
            (folder / f"{number}.emulate").write_text(pace, encoding="utf-8")


def _by_node(
    common: dict[str, Any], seats: Sequence[Seat], cluster: ClusterSpec
) -> dict[str, dict[str, Any]]:
    nodes = list(dict.fromkeys(seat.node for seat in seats))
    requests = {}
    for group, node in enumerate(nodes):
        mine = [(rank, seat) for rank, seat in enumerate(seats) if seat.node == node]
        numbers = cluster.device_numbers.get(node)
        visible = ",".join(
            str(numbers[seat.device] if numbers else seat.device) for _, seat in mine
        )
        is_emulated = mine[0][1].gpu in cluster.emulations
        ranks = [
            {
                "rank": rank,
                "device": seat.device,
                "environment": {
                    "RANK": str(rank),
                    "LOCAL_RANK": str(local),
                    "LOCAL_WORLD_SIZE": str(len(mine)),
                    "GROUP_RANK": str(group),
                    "CUDA_VISIBLE_DEVICES": "" if is_emulated else visible,
                    "CUDA_DEVICE_ORDER": "PCI_BUS_ID",  # the order of the driver's own numbers
                },
            }
            for local, (rank, seat) in enumerate(mine)
        ]
        reports = ""
        if mine[0][0] == 0:
            written = common["environment"]["DRYSTONE_PROGRESS"]
            reports = written if common["is_command"] else "rank-0.out"
        requests[node] = {**common, "ranks": ranks, "reports": reports}
    return requests


def _runtime_arguments(
    job: TrainingJob, plan_file: Path, plan: Plan | None, num_steps: int, checkpoints: Path
) -> list[str]:
    assert plan is not None  # a job without a command names a model
    return [
        PYTHON, "-m", "drystone.run.train", str(plan_file),
        "--steps", str(num_steps), "--data", job.data, "--checkpoints", str(checkpoints),
        "--timeout", str(COLLECTIVE_TIMEOUT_SECONDS), *job.train.arguments(),
        *(["--rebalance"] if can_rebalance(plan) else []),
    ]  # fmt: skip


def can_rebalance(plan: Plan) -> bool:
    """Unlike GPUs that share batches and nothing else: samples can move while they train."""
    stage = plan.stages[0]
    is_data_parallel = len(plan.stages) == 1 and stage.tp * stage.cp == 1
    return is_data_parallel and len(plan.gpus) > 1


def _own_command(command: tuple[str, ...], given: Mapping[str, str]) -> list[str]:
    """`python` is the one that runs the agent, unless the job has a PATH of its own to find it."""
    return [PYTHON if _is_our_python(command, given) else command[0], *command[1:]]


def _is_our_python(command: tuple[str, ...], given: Mapping[str, str]) -> bool:
    return not command or (command[0] in ("python", "python3") and "PATH" not in given)


def describe_plan(plan: Plan | None, seats: Sequence[Seat]) -> str:
    """`1 A100 + 2 T4, uneven, batches 1x6/2x1`: the plan in a few words."""
    counts: dict[str, int] = {}
    for seat in seats:
        counts[seat.gpu] = counts.get(seat.gpu, 0) + 1
    gpus = " + ".join(f"{count} {gpu}" for gpu, count in counts.items())
    if plan is None:
        return f"{gpus}, own script"
    ranks = [share for stage in plan.stages for share in stage.ranks]
    shares = "/".join(f"{share.count}x{share.batch}" for share in ranks)
    return f"{gpus}, {_way_in_words(plan)}, batches {shares}"


def _way_in_words(plan: Plan) -> str:
    """`cell tp=2`, whose ranks share each of their samples; `even` where all do the same."""
    shares = [share for stage in plan.stages for share in stage.ranks]
    degrees = {"tp": max(stage.tp for stage in plan.stages), "pp": len(plan.stages)}
    split = [f"{name}={degree}" for name, degree in degrees.items() if degree > 1]
    if not split and len({(share.batch, share.state_share) for share in shares}) == 1:
        return "even"
    return " ".join([plan.way.value, *split])


def _python_path(command: tuple[str, ...], given: Mapping[str, str]) -> str:
    """Where modules are found before all others: the job's own first, then where this package is.

    An interpreter of the user's own has packages of its own: ours would come before them. And a
    folder of installed packages is searched without being named.
    """
    own = given.get("PYTHONPATH", "")
    if not _is_our_python(command, given):
        return own
    root = Path(__file__).resolve().parents[3]
    places = [*own.split(os.pathsep), *os.environ.get("PYTHONPATH", "").split(os.pathsep)]
    if root.name not in ("site-packages", "dist-packages"):
        places.append(str(root))
    return os.pathsep.join(dict.fromkeys(place for place in places if place))


def order_launch(
    journal: Journal,
    record: JobRecord,
    engine: Engine,
    *,
    busy: Mapping[str, set[int]],
    folder: Path,
    lease_seconds: float,
    owner_variables: Mapping[str, str] | None = None,
    run_as: str = "",
    replaces: int = 0,
) -> LaunchOrder | None:
    """What the agents are to start; None while devices are taken by processes that still leave.

    Raises `AgentGone` if the node of the first rank does not answer.
    """
    nodes = journal.live.state.nodes
    placed = [(nodes[row].id, nodes[row].gpu, count) for row, count in record.placement]
    seats = take_seats(placed, busy, {node.id: node.num_gpus for node in nodes})
    if seats is None:
        return None
    job = journal.live.jobs[record.spec.id].job
    plan = journal.plan_of(record.spec, record.option)
    seats = seat_ranks(seats, plan)
    num_steps = count_steps(job, journal.book.shape(job))
    done_steps = int(record.done_samples // record.spec.global_batch)
    rivals: Sequence[Plan] = ()
    if plan is not None and not job.is_command and num_steps - done_steps >= MIN_STEPS_TO_TRY:
        rivals = journal.book.rivals(job, journal.book.counts_of(job, record.option), plan)
    order = make_order(
        job,
        job_id=record.spec.id,
        epoch=record.num_starts,
        num_steps=num_steps,
        plan=plan,
        rivals=rivals,
        seats=seats,
        rendezvous=engine.rendezvous(seats[0].node),
        cluster=journal.cluster,
        folder=folder,
        lease_seconds=lease_seconds,
        owner_variables=owner_variables,
        run_as=run_as,
        replaces=replaces,
    )
    return replace(order, done_steps=done_steps)


def busy_devices(
    seen: Iterable[Sequence[Seen]], orders: Iterable[LaunchOrder]
) -> dict[str, set[int]]:
    """Devices by node that cannot be given away: processes are there, or were ordered there."""
    busy: dict[str, set[int]] = {}
    for parts in seen:
        for part in parts:
            if not part.is_over:
                busy.setdefault(part.node, set()).update(part.devices)
    for order in orders:
        for seat in order.seats:
            busy.setdefault(seat.node, set()).add(seat.device)
    return busy
