"""Odd markets for the solver of prices: zeros, ties, one type, huge and tiny numbers."""

from __future__ import annotations

import numpy as np

from drystone.schedule.prices.shadow_prices import Market
from drystone.schedule.snapshot import FloatArray

NUM_STYLES = 6


def make_odd_market(seed: int) -> tuple[Market, FloatArray | None]:
    """A market of up to 8 jobs and 10 types, and prices to start from, if any."""
    chance = np.random.default_rng(seed)
    num_jobs, num_options = int(chance.integers(1, 9)), int(chance.integers(1, 12))
    num_types = int(chance.choice([1, 1, 2, 3, 6, 10]))
    values = _values(chance, (num_jobs, num_options))
    counts = np.zeros((num_types, num_jobs, num_options))
    rows, options = np.indices((num_jobs, num_options))
    kinds = chance.integers(num_types, size=values.shape)
    powers = 2.0 ** chance.integers(0, 7, values.shape)
    any_number = chance.integers(1, 65, values.shape).astype(np.float64)
    counts[kinds, rows, options] = powers if chance.random() < 0.5 else any_number
    also = chance.random(values.shape) < 0.15  # takes a second type
    counts[chance.integers(num_types, size=also.sum()), rows[also], options[also]] = 3.0
    capacity = chance.integers(0, 100, num_types).astype(np.float64)
    if chance.random() < 0.5:
        capacity = np.where(chance.random(num_types) < 0.2, 0.0, 2.0 ** (capacity % 8))
    starts = (
        None,
        np.zeros(num_types),
        10.0 ** chance.uniform(-10, 10, num_types),
        chance.random(num_types) * values.max(),
    )
    market = Market(values=values, counts=tuple(counts), capacity=capacity)
    return market, starts[int(chance.integers(len(starts)))]


def _values(chance: np.random.Generator, shape: tuple[int, int]) -> FloatArray:
    style = int(chance.integers(NUM_STYLES))
    values: FloatArray = (
        chance.random(shape),
        10.0 ** chance.uniform(-300, 290, shape),
        chance.integers(0, 3, shape).astype(np.float64),
        2.0 ** chance.integers(-60, 60, shape),
        np.repeat(chance.lognormal(0, 1, (1, shape[1])), shape[0], axis=0),
        10.0 ** chance.uniform(-20, 20, (shape[0], 1)) * chance.random(shape),
    )[style]
    values[chance.random(shape) < chance.choice([0.0, 0.2, 0.9])] = 0.0
    return values
