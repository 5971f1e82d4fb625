"""Simulated faults of nodes: when they break or slow down, and when they recover."""

from __future__ import annotations

from drystone.run.events import NodeBack, NodeLost, NodeSlowed
from drystone.run.simulate.clock import Action, VirtualTime
from drystone.run.simulate.faults import Dice
from drystone.run.simulate.jobs import JobRuns


class NodeFaults:
    """Losses and slowdowns, one after the other, as the dice say."""

    def __init__(self, time: VirtualTime, dice: Dice, runs: JobRuns) -> None:
        self._time, self._dice, self._runs = time, dice, runs
        self._plan(0.0, dice.spec.node_losses_per_hour, self._lose)
        self._plan(0.0, dice.spec.node_slowdowns_per_hour, self._slow)

    def _plan(self, now_seconds: float, per_hour: float, action: Action) -> None:
        if per_hour > 0:
            self._time.later(now_seconds + self._dice.seconds_until(per_hour), action)

    def _pick(self) -> int:
        """A node that is there, lost ones among them; -1 where there is none."""
        state = self._time.state
        if not state.gone:
            return self._dice.pick_node(len(state.nodes)) if state.nodes else -1
        there = [row for row in range(len(state.nodes)) if row not in state.gone]
        return there[self._dice.pick_node(len(there))] if there else -1

    def _lose(self, time_seconds: float) -> None:
        node = self._pick()
        self._plan(time_seconds, self._dice.spec.node_losses_per_hour, self._lose)
        state = self._time.state
        if node < 0 or node in state.lost:
            return
        self._runs.interrupt_on(node, time_seconds, f"node {state.nodes[node].id} was lost")
        self._time.record(NodeLost(time_seconds=time_seconds, node=node))
        mended_seconds = time_seconds + self._dice.spec.repair_seconds
        self._time.later(mended_seconds, self._mend, node, state.nodes[node].id)

    def _slow(self, time_seconds: float) -> None:
        node = self._pick()
        self._plan(time_seconds, self._dice.spec.node_slowdowns_per_hour, self._slow)
        state = self._time.state
        if node < 0 or node in state.lost:
            return
        self._set_speed(time_seconds, node, self._dice.spec.slow_speed_share)
        quick_seconds = time_seconds + self._dice.spec.slow_seconds
        self._time.later(quick_seconds, self._restore_speed, node, state.nodes[node].id)

    def _mend(self, time_seconds: float, node: int, node_id: str) -> None:
        if self._is_here(node, node_id):
            self._time.record(NodeBack(time_seconds=time_seconds, node=node))

    def _restore_speed(self, time_seconds: float, node: int, node_id: str) -> None:
        if self._is_here(node, node_id):
            self._set_speed(time_seconds, node, 1.0)

    def _is_here(self, node: int, node_id: str) -> bool:
        """Whether the row still is that node: a rented one may be gone, or another in its place."""
        state = self._time.state
        return node not in state.gone and state.nodes[node].id == node_id

    def _set_speed(self, time_seconds: float, node: int, share: float) -> None:
        self._time.record(NodeSlowed(time_seconds=time_seconds, node=node, speed_share=share))
        self._runs.change_speed_on(node, time_seconds)
