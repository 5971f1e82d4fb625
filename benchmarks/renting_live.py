"""Does renting keep its budget? Real training on rented nodes, with a clock that runs fast.

A stream of small training jobs (real ones: a perceptron learns by gradient descent, in NumPy, with
checkpoints) arrives; the policy `budget` rents nodes from the simulated cloud, which live as agents
and processes on this machine, or with `--engine ray` as raylets that join a Ray cluster and leave
it. The log's clock runs `--speed` times as fast as the wall, and jobs report their steps on that
clock, so that hours of renting take minutes. Steps are paced by sleeping, so that a busy machine
does not make them longer. Processes start no faster for it: at 30 times the speed a start of five
seconds, of a node and a job together, costs two and a half minutes, which the policy is told.

Jobs come every four minutes or so. A budget can be kept only if there is work for it and it
suffices for the work, and what the work costs goes by what starts cost, that is, by how busy the
machine is (docs/renting.md). The range of the run is printed; where the budget lies outside of it,
the run says so. Promised: after the warm-up the mean spend is within 5 % of the budget, the rate is
never above the hard cap, every node is given back, and the ledger is the provider's bill. What the
warm-up spent too much is owed and made good after it, so the rest must be long against the horizon
of the feedback (an hour or two): `make bench` takes eight hours after a warm-up of two.

    python benchmarks/renting_live.py [--hours 5] [--warm-up 1.5] [--speed 30] [--engine ray]
"""

from __future__ import annotations

import argparse
import json
import os
import random
import signal
import sys
import tempfile
import threading
import time
from collections.abc import Callable
from contextlib import ExitStack
from dataclasses import asdict, dataclass
from pathlib import Path

from drystone.describe.files.cluster import ClusterSpec
from drystone.describe.files.job import make_job
from drystone.describe.files.market import parse_market
from drystone.run.control.controller import Controller, ControllerSettings
from drystone.run.control.notes import Note
from drystone.run.control.runs import Patience
from drystone.run.control.world import Pace
from drystone.run.events import Event
from drystone.run.lifecycle import TERMINAL
from drystone.run.renting.ledger import Ledger
from drystone.run.renting.provider import NodeJoiner, Renting, Stage, live_offers
from drystone.run.renting.simulated_cloud import CloudConditions, SimulatedCloud
from drystone.run.state import ClusterState
from drystone.units import HOUR_SECONDS
from figures import print_figures
from renting_time import (
    GPU_DOLLARS_PER_HOUR,
    MOST_GPUS,
    SPEEDUP_POWER,
    demand,
    seconds_by_kind,
)

MARKET = """
offers:
  - name: t4
    gpu: T4
    num_gpus: {num_gpus}
    price_dollars_per_hour: {price}
    start_delay_seconds: 90
  - name: t4-other
    gpu: T4
    num_gpus: {num_gpus}
    price_dollars_per_hour: {other_price}
    start_delay_seconds: 60
    reclaims_per_hour: 0.05
"""
OTHER_GPU_DOLLARS_PER_HOUR = 0.55
_CURVE_SECONDS = 600.0
# A perceptron with one hidden layer learns a function; every step takes the wall time it is told.
TRAINER = """
import json, os, signal, time
from pathlib import Path
folder, steps = Path(os.environ["DRYSTONE_CHECKPOINTS"]), int(os.environ["DRYSTONE_STEPS"])
speed, ranks = float(os.environ["CLOCK_SPEED"]), int(os.environ["WORLD_SIZE"])
seconds = float(os.environ["STEP_SECONDS"]) / ranks ** float(os.environ["SPEEDUP_POWER"])
leaving = []
signal.signal(signal.SIGTERM, lambda *_: leaving.append(1))
def save(step, weights):
    np.savez(folder / ".part.npz", step=step, a=weights[0], b=weights[1])
    (folder / ".part.npz").replace(folder / "saved.npz")
def tell(**report):
    with open(os.environ["DRYSTONE_PROGRESS"], "a") as file:
        file.write(json.dumps(report) + "\\n")
if os.environ["RANK"] != "0":
    while not leaving and not (folder / f"over-{os.environ['DRYSTONE_EPOCH']}").exists():
        time.sleep(0.1)
    raise SystemExit(0)
import numpy as np
dice = np.random.default_rng(0)
weights, step = [dice.normal(size=(8, 32)) / 3, dice.normal(size=(32, 1)) / 6], 0
if (folder / "saved.npz").exists():
    kept = np.load(folder / "saved.npz")
    weights, step = [kept["a"], kept["b"]], int(kept["step"])
tell(event="started", step=step)
while step < steps and not leaving:
    began = time.monotonic()
    x = dice.normal(size=(64, 8))
    y = np.sin(x.sum(axis=1, keepdims=True))
    hidden = np.tanh(x @ weights[0])
    error = hidden @ weights[1] - y
    grad = hidden.T @ error / 64, x.T @ ((error @ weights[1].T) * (1 - hidden**2)) / 64
    weights[1] -= 0.1 * grad[0]
    weights[0] -= 0.1 * grad[1]
    time.sleep(max(0.0, seconds / speed - (time.monotonic() - began)))
    step += 1
    tell(event="step", step=step, loss=float((error**2).mean()), step_seconds=seconds)
    if step % 10 == 0:
        save(step, weights)
        tell(event="checkpoint", step=step)
save(step, weights)
(folder / f"over-{os.environ['DRYSTONE_EPOCH']}").touch()
"""


@dataclass(frozen=True, slots=True, kw_only=True)
class Outcome:
    """What a run amounted to."""

    mean_dollars_per_hour: float  # after the warm-up, until the last job came
    highest_dollars_per_hour: float
    num_rented: int
    num_unreleased: int
    ledger_micro_dollars: int
    billed_micro_dollars: int
    num_jobs: int
    num_done: int
    paid_seconds: dict[str, float]  # of rented nodes, by what they did
    cheapest_dollars_per_hour: float  # what these jobs cost on one GPU each
    fastest_dollars_per_hour: float  # and on all that they may have
    spent_dollars: list[tuple[float, float]]  # hours since the beginning, dollars by then


def main() -> int:
    """Print what was measured; 1 if a promise is broken."""
    parser = argparse.ArgumentParser()
    parser.add_argument("--hours", type=float, default=5.0)
    parser.add_argument("--warm-up", type=float, default=1.5)
    parser.add_argument("--speed", type=float, default=30.0)
    parser.add_argument("--budget", type=float, default=4.5)
    parser.add_argument("--hard-cap", type=float, default=10.0)
    parser.add_argument(
        "--start-seconds", type=float, default=5.0, help="of a node and a process, by the wall"
    )
    parser.add_argument("--seed", type=int, default=1)
    parser.add_argument("--engine", choices=["local", "ray"], default="local")
    parser.add_argument("--node-gpus", type=int, default=1, help="GPUs of a rented node")
    parser.add_argument("--keep", type=Path, help="write what was measured to this file")
    given = parser.parse_args()
    signal.signal(signal.SIGTERM, lambda *_: sys.exit(1))  # nothing is left running
    print(f"load {os.getloadavg()[0]:.1f} on {os.cpu_count()} cores; {given}")
    with ExitStack() as stack:
        folder = Path(stack.enter_context(tempfile.TemporaryDirectory()))
        found = run(given, folder, stack)
    error = found.mean_dollars_per_hour / given.budget - 1
    print(
        f"{found.num_done} of {found.num_jobs} jobs done on {found.num_rented} rented nodes, "
        f"{found.num_unreleased} of them not given back"
    )
    print(
        f"mean spend after warm-up ${found.mean_dollars_per_hour:.3f}/h, budget ${given.budget}/h: "
        f"{error:+.1%}; highest rate ${found.highest_dollars_per_hour:.2f}/h, "
        f"hard cap ${given.hard_cap}/h"
    )
    whole = sum(found.paid_seconds.values())
    shares = (f"{kind} {seconds / whole:.1%}" for kind, seconds in found.paid_seconds.items())
    print(
        f"paid for: {', '.join(shares)}; all jobs on one GPU each would cost "
        f"${found.cheapest_dollars_per_hour:.2f}/h, on {MOST_GPUS} each "
        f"${found.fastest_dollars_per_hour:.2f}/h"
    )
    if not found.cheapest_dollars_per_hour <= given.budget <= found.fastest_dollars_per_hour:
        print("the budget lies outside of that range: it cannot be kept with these jobs here")
    print(f"ledger ${found.ledger_micro_dollars / 1e6:.6f}, provider's bill "
          f"${found.billed_micro_dollars / 1e6:.6f}")  # fmt: skip
    if given.keep is not None:
        keep(given, found)
    print_figures(
        {
            "spend_error": abs(error),
            "spend_beyond_budget": error,
            "cheapest_of_budget": found.cheapest_dollars_per_hour / given.budget,
            "fastest_of_budget": found.fastest_dollars_per_hour / given.budget,
            "highest_of_hard_cap": found.highest_dollars_per_hour / given.hard_cap,
            "num_unreleased": found.num_unreleased,
            "ledger_difference_dollars": abs(
                found.ledger_micro_dollars - found.billed_micro_dollars
            ) / 1e6,
            "done_share": found.num_done / found.num_jobs,
        }
    )  # fmt: skip
    is_kept = (
        abs(error) <= 0.05
        and found.highest_dollars_per_hour <= given.hard_cap * (1 + 1e-9)
        and found.num_unreleased == 0
        and found.ledger_micro_dollars == found.billed_micro_dollars
        and found.num_done == found.num_jobs
    )
    return 0 if is_kept else 1


def keep(given: argparse.Namespace, found: Outcome) -> None:
    """What was asked and what was measured, as a file."""
    asked = {key: value for key, value in vars(given).items() if key != "keep"}
    load = os.getloadavg()[0]
    table = {"asked": asked, "load_at_end": load, "cores": os.cpu_count(), "found": asdict(found)}
    given.keep.write_text(json.dumps(table, indent=1) + "\n", encoding="utf-8")


def run(given: argparse.Namespace, folder: Path, stack: ExitStack) -> Outcome:
    """Jobs arrive for so many hours of the fast clock; then all is finished and given back."""
    began = time.time()

    def clock() -> float:
        return began + (time.time() - began) * given.speed

    market = MARKET.format(
        num_gpus=given.node_gpus,
        price=given.node_gpus * GPU_DOLLARS_PER_HOUR,
        other_price=given.node_gpus * OTHER_GPU_DOLLARS_PER_HOUR,
    )
    offers = live_offers(parse_market(market), is_simulated=True)
    conditions = CloudConditions(seed=given.seed, stockout_share=0.05, delay_spread=0.5)
    cloud = SimulatedCloud(folder / "cloud.json", offers, conditions, clock)
    controller = make_controller(given, folder, cloud, clock, stack)
    thread = threading.Thread(target=controller.run, daemon=True)
    thread.start()
    stack.callback(lambda: (controller.leave(), thread.join(timeout=30)))  # also if it is cut off
    (folder / "trainer.py").write_text(TRAINER)
    start, jobs = clock(), submit_jobs(given, folder, controller, clock)
    rentals = controller.journal.live.state.rentals
    deadline = time.monotonic() + 600
    while time.monotonic() < deadline and (
        any(controller.find(one).state not in TERMINAL for one in jobs)
        or rentals.rented or rentals.asked or len(rentals.settled) < rentals.num_asked
    ):  # fmt: skip
        time.sleep(0.2)
    controller.leave()
    thread.join()
    events = [event for _, event in controller.store.read()]
    done = sum(controller.find(one).state.value == "done" for one in jobs)
    window = (start + given.warm_up * HOUR_SECONDS, start + given.hours * HOUR_SECONDS)
    if controller.last_error:
        print(f"last error: {controller.last_error}")
    controller.close(ends_agents=True)
    return judge(events, cloud, window, given, num_jobs=len(jobs), num_done=done)


def make_controller(
    given: argparse.Namespace,
    folder: Path,
    cloud: SimulatedCloud,
    clock: Callable[[], float],
    stack: ExitStack,
) -> Controller:
    """The controller, on this machine or on a Ray cluster of its own."""
    engine, joiner, cluster = None, None, ClusterSpec(nodes=())
    if given.engine == "ray":
        from drystone.run.engines.ray.engine import RayEngine
        from drystone.run.engines.ray.watch import RayConnection
        from drystone.run.renting.joining import RayJoiner

        address = start_ray(stack)
        engine = RayEngine(folder / "agents", RayConnection(address))
        joiner, cluster = RayJoiner(address, folder / "rented"), engine.discover()
        stack.callback(end_raylets, joiner, folder / "rented")
    renting = Renting(
        provider=cloud,
        offers=tuple(cloud._offers.values()),
        joiner=joiner,
        budget_dollars_per_hour=given.budget,
        hard_cap_dollars_per_hour=given.hard_cap,
        look_seconds=0.3,
        patience_seconds=3600.0,
    )
    return Controller(
        ControllerSettings(
            folder=folder / "s",
            cluster=cluster,
            engine=engine,
            policy="budget",
            pace=Pace(
                tick_seconds=0.1,
                round_seconds=1.0,
                startup_seconds=given.start_seconds * given.speed,
            ),
            patience=Patience(grace_seconds=20.0, progress_seconds=300.0, silence_seconds=60.0),
            renting=renting,
            clock=clock,
        )
    )


def start_ray(stack: ExitStack) -> str:
    """A head without GPUs on loopback, ended with the benchmark, beside any other Ray here."""
    os.environ["RAY_TMPDIR"] = stack.enter_context(tempfile.TemporaryDirectory(prefix="ray-"))
    from ray.cluster_utils import Cluster

    head = {
        "num_cpus": 0, "num_gpus": 0, "include_dashboard": False, "node_ip_address": "127.0.0.2",
        "object_store_memory": 80 * 2**20,
        "_system_config": {"health_check_initial_delay_ms": 0, "health_check_period_ms": 1000},
    }  # fmt: skip
    cluster = Cluster(initialize_head=True, head_node_args=head)
    stack.callback(cluster.shutdown)
    return str(cluster.address)


def end_raylets(joiner: NodeJoiner, folder: Path) -> None:
    """Those that are left where a run was cut off."""
    for file in folder.glob("*.json"):
        joiner.detach(file.stem, "the benchmark ends")


def submit_jobs(
    given: argparse.Namespace, folder: Path, controller: Controller, clock: Callable[[], float]
) -> list[str]:
    """A stream of jobs of three lengths, ten to forty minutes on one GPU."""
    dice, jobs = random.Random(given.seed), list[str]()
    end = clock() + given.hours * HOUR_SECONDS
    next_seconds = clock()
    while next_seconds < end:
        while clock() < next_seconds:
            time.sleep(0.05)
        steps = dice.choice([10, 25, 40])
        table = {
            "command": f"{sys.executable} {folder / 'trainer.py'}",
            "train": {"steps": steps, "batch": 60},  # one sample a second
            "gpus": {"max": MOST_GPUS},
            "owner": dice.choice(["ada", "bob"]),
            "environment": {
                "STEP_SECONDS": "60",
                "CLOCK_SPEED": str(given.speed),
                "SPEEDUP_POWER": str(SPEEDUP_POWER),
                "OMP_NUM_THREADS": "1",
                "OPENBLAS_NUM_THREADS": "1",
            },
        }
        jobs.append(controller.submit(make_job(table, folder=folder))[0])
        next_seconds += dice.uniform(0.5, 1.5) * HOUR_SECONDS / 16
    return jobs


def judge(
    events: list[Event],
    cloud: SimulatedCloud,
    window: tuple[float, float],
    given: argparse.Namespace,
    *,
    num_jobs: int,
    num_done: int,
) -> Outcome:
    """Money between two times, the highest rate, and whether everything was given back."""
    state, book = ClusterState([]), Ledger()
    highest, spent, curve = 0.0, list[float](), list[tuple[float, float]]()
    began = window[0] - given.warm_up * HOUR_SECONDS
    for event in events:
        now = event.time_seconds
        while len(spent) < 2 and now >= window[len(spent)]:
            spent.append(state.rentals.spent_dollars(window[len(spent)]))
        while began + len(curve) * _CURVE_SECONDS <= now:
            at = began + len(curve) * _CURVE_SECONDS
            curve.append(((at - began) / HOUR_SECONDS, state.rentals.spent_dollars(at)))
        book.record(event)
        if not isinstance(event, Note):
            state.record(event)
        highest = max(highest, state.rentals.dollars_per_hour())
    while len(spent) < 2:
        spent.append(state.rentals.spent_dollars(window[len(spent)]))
    made, paid = cloud.status("drystone-"), seconds_by_kind(events)
    cheapest, fastest = demand(events, paid, given.node_gpus, given.hours)
    return Outcome(
        mean_dollars_per_hour=(spent[1] - spent[0]) / ((window[1] - window[0]) / HOUR_SECONDS),
        highest_dollars_per_hour=highest,
        num_rented=sum(one.stage is not Stage.FAILED for one in made),
        num_unreleased=sum(one.stage in (Stage.STARTING, Stage.RUNNING) for one in made),
        ledger_micro_dollars=book.statement(state.now_seconds).total,
        billed_micro_dollars=sum(one.billed_micro_dollars or 0 for one in made),
        num_jobs=num_jobs,
        num_done=num_done,
        paid_seconds=paid,
        cheapest_dollars_per_hour=cheapest,
        fastest_dollars_per_hour=fastest,
        spent_dollars=curve,
    )


if __name__ == "__main__":
    sys.exit(main())
