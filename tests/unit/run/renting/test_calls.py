"""Calls to a provider that fails, forgets or lags: each for itself, paced, none doubled."""

import threading
import time

import pytest

from drystone.describe.market import Offer
from drystone.run.renting import calls as renting_calls
from drystone.run.renting.calls import ProviderCalls
from drystone.run.renting.provider import Rental, Stage

OFFER = Offer(name="t4", gpu="T4", num_gpus=1, price_dollars_per_hour=0.4)


class Moody:
    """A provider that answers at once, and not always well."""

    def __init__(self) -> None:
        self.nodes: dict[str, Stage] = {}
        self.num_calls = {"rent": 0, "release": 0, "status": 0}
        self.fails: set[str] = set()
        self.is_empty = self.is_slow = False
        self.lock = threading.Lock()

    def quote(self):
        return {"t4": 0.4}

    def rent(self, token, offer):
        self.num_calls["rent"] += 1
        if self.is_slow:
            time.sleep(3)
        if token in self.fails:
            raise RuntimeError("boom on create")
        with self.lock:
            self.nodes.setdefault(token, Stage.RUNNING)

    def release(self, token):
        self.num_calls["release"] += 1
        if token in self.fails:
            raise RuntimeError("boom on terminate")
        with self.lock:
            self.nodes[token] = Stage.ENDED

    def status(self, fleet):
        self.num_calls["status"] += 1
        if self.is_empty and fleet == "f":
            return []
        with self.lock:
            return [
                Rental(token=token, offer="t4", stage=stage, price_dollars_per_hour=0.4)
                for token, stage in self.nodes.items()
                if token.startswith(fleet)
            ]


@pytest.fixture
def provider():
    return Moody()


@pytest.fixture
def calls(provider):
    made = ProviderCalls(provider, family="f", look_seconds=0.1)
    made.start()
    yield made
    made.stop()


def until(condition, *, seconds: float = 10.0):
    deadline = time.monotonic() + seconds
    while not condition():
        assert time.monotonic() < deadline, "it did not happen"
        time.sleep(0.01)


@pytest.mark.parametrize("way", ["fails", "is_slow"])
def test_one_call_that_fails_or_hangs_keeps_no_other_waiting(calls, provider, way):
    if way == "fails":
        provider.fails.add("f-0")
    provider.nodes["f-9"] = Stage.RUNNING
    rents = {f"f-{number}": OFFER for number in range(3)}
    provider.is_slow = way == "is_slow"
    calls.want(rents, {"f-9"})
    until(lambda: provider.nodes["f-9"] is Stage.ENDED, seconds=2.0)
    if way == "fails":
        until(lambda: {"f-1", "f-2"} <= provider.nodes.keys())
        until(lambda: "boom on create" in calls.call_trouble)
        assert calls.requested == {"f-0", "f-1", "f-2"}  # what failed might exist all the same


def test_a_call_that_keeps_failing_is_tried_ever_more_rarely_and_looks_are_paced(calls, provider):
    provider.fails.add("f-0")
    deadline = time.monotonic() + 1.5
    while time.monotonic() < deadline:
        calls.want(
            {"f-0": OFFER, "f-1": OFFER} if "f-1" not in provider.nodes else {"f-0": OFFER}, ()
        )
        time.sleep(0.001)
    # After 0, 0.1, 0.3, 0.7, 1.5 seconds; a look at every call, and one at least every 0.1 s.
    assert 2 <= provider.num_calls["rent"] <= 8
    assert provider.num_calls["status"] <= 80
    provider.fails.clear()
    until(lambda: (calls.want({"f-0": OFFER}, ()), "f-0" in provider.nodes)[1])


def test_a_node_that_is_missing_from_a_listing_is_not_gone(calls, provider, monkeypatch):
    monkeypatch.setattr(renting_calls, "_MISSING_SECONDS", 0.5)
    calls.want({"f-0": OFFER}, ())
    until(lambda: "f-0" in calls.view.rentals)
    provider.is_empty = True  # the list, for longer than one asks it alone; not the direct question
    seen = calls.view.asked
    until(lambda: calls.view.asked > seen + 1.2)
    assert calls.view.rentals["f-0"].stage is Stage.RUNNING
    del provider.nodes["f-0"]
    until(lambda: "f-0" not in calls.view.rentals)
