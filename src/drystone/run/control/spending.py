"""What did each team spend, hour by hour? The runs of its jobs, each at what its GPUs cost."""

from __future__ import annotations

from collections import defaultdict

from drystone.units import HOUR_SECONDS


class Spending:
    """Dollars by team and hour, of the runs that ended; what runs now is added by who asks."""

    def __init__(self) -> None:
        self.by_hour: dict[str, dict[int, float]] = defaultdict(dict)

    def add(
        self, team: str, start_seconds: float, end_seconds: float, dollars_per_hour: float
    ) -> None:
        """A run that ended."""
        if dollars_per_hour > 0:
            split_hours(self.by_hour[team], start_seconds, end_seconds, dollars_per_hour)

    def since(self, team: str, start_seconds: float) -> float:
        """What a team spent from a time on, which is the beginning of an hour."""
        first = int(start_seconds // HOUR_SECONDS)
        hours = self.by_hour.get(team, {})
        return sum(dollars for hour, dollars in hours.items() if hour >= first)


def split_hours(
    hours: dict[int, float], start_seconds: float, end_seconds: float, dollars_per_hour: float
) -> None:
    """Add what a stretch of time cost to each of the hours (since 1970) that it touches."""
    at = start_seconds
    while at < end_seconds:
        hour = int(at // HOUR_SECONDS)
        until = min((hour + 1) * HOUR_SECONDS, end_seconds)
        hours[hour] = hours.get(hour, 0.0) + dollars_per_hour * (until - at) / HOUR_SECONDS
        at = until
