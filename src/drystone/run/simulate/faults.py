"""What goes wrong, and when? Nodes lost or slow, starts that fail, a market's whims: one seed."""

from __future__ import annotations

from dataclasses import dataclass

import numpy as np

from drystone.errors import InvalidSpec
from drystone.schedule.snapshot import FloatArray
from drystone.units import HOUR_SECONDS


@dataclass(frozen=True, slots=True, kw_only=True)
class FaultSpec:
    """How often what goes wrong. All zero: nothing does."""

    seed: int = 0
    node_losses_per_hour: float = 0.0  # of the whole cluster
    repair_seconds: float = 3600.0
    node_slowdowns_per_hour: float = 0.0  # of the whole cluster
    slow_speed_share: float = 0.5
    slow_seconds: float = 3600.0
    failed_start_share: float = 0.0
    checkpoint_seconds: float = 600.0  # a lost node costs the work since the last one
    speed_error_share: float = 0.0  # how far the speeds that policies see may be off, each way
    stock_out_share: float = 0.0  # of the nodes that are asked for
    price_changes_per_hour: float = 0.0  # of the whole market
    price_change_share: float = 0.5  # how far a changed price may be off the listed one, each way

    def __post_init__(self) -> None:
        if not 0 <= self.failed_start_share < 1 or not 0 < self.slow_speed_share <= 1:
            raise InvalidSpec("faults: failed_start_share is 0 to 1, slow_speed_share above 0 to 1")
        if not 0 <= self.speed_error_share < 1 or not 0 <= self.price_change_share < 1:
            raise InvalidSpec("faults: speed_error_share and price_change_share are 0 to 1")
        if not 0 <= self.stock_out_share < 1:
            raise InvalidSpec("faults: stock_out_share is 0 to 1")
        rates = (
            self.node_losses_per_hour, self.node_slowdowns_per_hour, self.price_changes_per_hour
        )  # fmt: skip
        if min(rates) < 0:
            raise InvalidSpec("faults: rates must not be negative")
        if min(self.repair_seconds, self.slow_seconds, self.checkpoint_seconds) <= 0:
            raise InvalidSpec("faults: durations must be above 0")


class Dice:
    """The chance of one run: the same seed gives the same faults."""

    def __init__(self, spec: FaultSpec) -> None:
        self.spec = spec
        losses, starts, speeds, market = np.random.SeedSequence(spec.seed).spawn(4)
        # Apart, so that how many jobs a policy starts does not move the nodes' faults.
        self._nodes = np.random.default_rng(losses)
        self._starts = np.random.default_rng(starts)
        self._speeds = np.random.default_rng(speeds)
        self._market = np.random.default_rng(market)

    def seconds_until(self, per_hour: float) -> float:
        """How long until the next fault of a kind that happens so often."""
        return float(self._nodes.exponential(HOUR_SECONDS / per_hour))

    def pick_node(self, num_nodes: int) -> int:
        """Which node it hits."""
        return int(self._nodes.integers(num_nodes))

    def start_fails(self) -> bool:
        """Whether the start that is being made will fail."""
        share = self.spec.failed_start_share
        return share > 0 and bool(self._starts.random() < share)

    def speed_factors(self, num_types: int) -> FloatArray:
        """By GPU type: how much faster or slower than its options say a job really is."""
        error = self.spec.speed_error_share
        return self._speeds.uniform(1 - error, 1 + error, num_types)

    def market_seconds_until(self, per_hour: float) -> float:
        """How long until the provider does what it does so often."""
        return float(self._market.exponential(HOUR_SECONDS / per_hour))

    def is_out_of_stock(self) -> bool:
        """Whether a node that is being asked for will not come."""
        share = self.spec.stock_out_share
        return share > 0 and bool(self._market.random() < share)

    def pick_offer(self, num_offers: int) -> int:
        """Which offer's price changes."""
        return int(self._market.integers(num_offers))

    def price_factor(self) -> float:
        """What a listed price is multiplied with."""
        share = self.spec.price_change_share
        return float(self._market.uniform(1 - share, 1 + share))
