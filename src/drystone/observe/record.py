"""What did a policy know and pay at each decision? Noted while a run goes on, beside its events.

Prices live in a policy's memory and never become events; whoever wants to see them has to listen.
"""

from __future__ import annotations

from dataclasses import dataclass, field

import numpy as np

from drystone.schedule.decision import Decision
from drystone.schedule.policies import Memory, Policy
from drystone.schedule.snapshot import Snapshot


@dataclass(slots=True)
class RunRecord:
    """One entry a decision."""

    gpu_types: tuple[str, ...] = ()
    times_seconds: list[float] = field(default_factory=list)
    decision_seconds: list[float] = field(default_factory=list)
    spent_dollars: list[float] = field(default_factory=list)
    price_times_seconds: list[float] = field(default_factory=list)
    prices: list[list[float]] = field(default_factory=list)  # by GPU type, in the policy's units

    def note_decision(self, now_seconds: float, policy_seconds: float) -> None:
        """For the loop to call."""
        self.decision_seconds.append(policy_seconds)

    def listen(self, policy: Policy) -> Policy:
        """The same policy, overheard."""

        def overheard(snapshot: Snapshot, memory: Memory) -> tuple[list[Decision], Memory]:
            decisions, after = policy(snapshot, memory)
            self._note(snapshot, after)
            return decisions, after

        return overheard

    def _note(self, snapshot: Snapshot, memory: Memory) -> None:
        self.gpu_types = snapshot.gpu_types
        self.times_seconds.append(snapshot.now_seconds)
        self.spent_dollars.append(snapshot.spent_dollars)
        prices = getattr(memory, "prices", None)
        if isinstance(prices, np.ndarray) and prices.shape == (len(snapshot.gpu_types),):
            self.price_times_seconds.append(snapshot.now_seconds)
            self.prices.append([float(one) for one in prices])
