"""A cluster in virtual time: the world behind `drystone simulate`.

Everything that happens is an event in `log`; the state is their fold (`run/state.py`). Decisions
are taken whenever something has happened, or, with `round_seconds`, at the next round boundary
(with `decides_every_round` at every one of them while there are jobs). When the last job is settled
and nodes are still rented, one more decision is taken, so that they can be given back.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Sequence

from drystone.describe.cluster import NodeSpec
from drystone.describe.job import JobSpec
from drystone.describe.market import Offer
from drystone.describe.option import OptionSet
from drystone.errors import InvalidSpec, UnknownName
from drystone.run.events import Event
from drystone.run.simulate.clock import VirtualTime
from drystone.run.simulate.faults import Dice, FaultSpec
from drystone.run.simulate.jobs import JobRuns
from drystone.run.simulate.market import SimulatedMarket
from drystone.run.simulate.node_faults import NodeFaults
from drystone.run.snapshots import PresentSnapshot, SnapshotMaker
from drystone.run.state import ClusterState
from drystone.schedule.snapshot import Placement, Snapshot, StartupCost


class SimulatedWorld:
    """Jobs, nodes, offers and faults in virtual time."""

    def __init__(
        self,
        *,
        jobs: Sequence[JobSpec],
        nodes: Sequence[NodeSpec],
        options_of: Callable[[JobSpec], OptionSet],
        gpu_types: Sequence[str],
        startup: StartupCost | None = None,
        round_seconds: float = 0.0,
        decides_every_round: bool = False,
        horizon_seconds: float = math.inf,
        faults: FaultSpec | None = None,
        knows_lengths: bool = True,
        on_time: Callable[[float, int], None] | None = None,
        offers: Sequence[Offer] = (),
        budget_dollars_per_hour: float = math.inf,
        hard_cap_dollars_per_hour: float = math.inf,
    ) -> None:
        _check(nodes, offers, gpu_types)
        startup = startup or StartupCost()
        self._maker = SnapshotMaker(
            tuple(gpu_types),
            options_of,
            startup,
            knows_lengths=knows_lengths,
            offers=offers,
            budget_dollars_per_hour=budget_dollars_per_hour,
            hard_cap_dollars_per_hour=hard_cap_dollars_per_hour,
        )
        self.state = ClusterState(list(nodes))  # what all that is in the log led to
        self._time = VirtualTime(self.state, self._maker)
        dice = Dice(faults or FaultSpec())
        self._runs = JobRuns(
            self._time, dice, num_jobs=len(jobs), gpu_types=tuple(gpu_types), startup=startup
        )
        self._runs.expect(jobs)
        NodeFaults(self._time, dice, self._runs)
        self._desk = SimulatedMarket(self._time, dice, self._runs, offers)
        self._round_seconds, self._horizon_seconds = round_seconds, horizon_seconds
        self._decides_every_round = decides_every_round
        self._on_time = on_time
        self._wakes: set[float] = set()
        # Over is a run without unsettled jobs and rented nodes, without time, or without a future.
        self.is_over = not jobs
        self._go_on = self._time.step if round_seconds <= 0 else self._go_to_next_round
        if horizon_seconds < math.inf:
            self._time.later(horizon_seconds, self._reach_horizon)
        if jobs:
            self.advance()

    @property
    def log(self) -> list[Event]:
        """Everything that has happened."""
        return self._time.log

    @property
    def now_seconds(self) -> float:
        """What time it is."""
        return self.state.now_seconds

    @property
    def spent_dollars(self) -> float:
        """What rented nodes have cost so far."""
        return self.state.rentals.spent_dollars(self.now_seconds)

    def observe(self) -> Snapshot:
        """What is the case now."""
        return PresentSnapshot(self._maker, self.state, self.state.now_seconds)

    def launch(self, job_id: str, option: int, placement: Placement, reason: str) -> None:
        """Start a waiting job."""
        self._runs.launch(job_id, option, placement, reason)

    def stop(self, job_id: str, reason: str) -> None:
        """Take a running job's GPUs; its progress is kept."""
        self._runs.stop(job_id, reason)

    def refuse(self, job_id: str, reason: str) -> None:
        """Turn a waiting job away."""
        self._runs.refuse(job_id, reason)

    def rent(self, offer: str, num_nodes: int, reason: str) -> None:
        """Ask for nodes of an offer; they join after its start delay."""
        self._desk.ask(offer, num_nodes, reason)

    def release(self, node: int, reason: str) -> None:
        """Give a rented node back."""
        self._desk.release(node, reason)

    def wake(self, at_seconds: float, reason: str) -> None:
        """Let `advance` return at this time at the latest."""
        if at_seconds not in self._wakes:
            self._wakes.add(at_seconds)
            self._time.later(at_seconds, self._wake_up, at_seconds)

    def advance(self) -> None:
        """Jump to the next event, or to the first round boundary after it."""
        state = self.state
        if not state.num_running and self._waits_for_nothing():
            self.is_over = True
            return
        go_on = self._go_on
        go_on()
        if not state.num_running and self._runs.num_unsettled == 0 and not state.rentals.rented:
            self.is_over = True
        if self._on_time is not None:
            self._on_time(state.now_seconds, self._runs.num_unsettled)

    def _go_to_next_round(self) -> None:
        """The first round boundary after the next event, or the next one if every one counts."""
        length = self._round_seconds
        then = math.ceil(self._time.next_seconds() / length - 1e-9) * length
        if self._decides_every_round and self.state.active:
            then = min(then, self.now_seconds + length)
        self._time.run_until(min(then, self._horizon_seconds))

    def _reach_horizon(self, _: float) -> None:
        self.is_over = True

    def _wake_up(self, _: float, at_seconds: float) -> None:
        self._wakes.discard(at_seconds)

    def _waits_for_nothing(self) -> bool:
        """If nobody runs: whether all is done, or none will come and no node or call is due."""
        state = self.state
        return self._runs.num_unsettled == 0 or (
            self._runs.num_to_come == 0
            and not state.lost
            and not state.rentals.asked
            and not self._wakes
            and self._desk.num_changes_to_come == 0
        )


def _check(nodes: Sequence[NodeSpec], offers: Sequence[Offer], gpu_types: Sequence[str]) -> None:
    if not nodes and not offers:
        raise InvalidSpec("a cluster needs at least one node, or an offer to rent from")
    names = [offer.name for offer in offers]
    if len(set(names)) < len(names):
        raise InvalidSpec(f"two offers have one name: {', '.join(names)}")
    for offer in offers:
        if offer.gpu not in gpu_types:
            raise UnknownName("GPU type", offer.gpu, gpu_types, where=f"offer {offer.name}")
