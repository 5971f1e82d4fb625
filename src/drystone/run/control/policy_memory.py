"""Memory of a policy in the log, so that a new controller decides as the last would have.

`prices` and `budget` are remembered: debts and savings, who is protected, what jobs with limits
have used, prices. It is one text, in which dataclasses and named tuples of `drystone.schedule`
stand by name, and arrays with their type. Option sets and their rows are numbered anew at each
start of a controller, so of `budget` only money, limits and spares are kept, not its counts of
arrivals; other policies begin anew.
"""

from __future__ import annotations

import dataclasses
import json
import math
from collections.abc import Mapping, Sequence
from importlib import import_module
from typing import Any, Final

import numpy as np

from drystone.errors import InvalidSpec
from drystone.run.control.journal import Journal
from drystone.run.control.notes import Remembered
from drystone.schedule.budget.arrivals import first_arrivals
from drystone.schedule.budget.policy import BudgetMemory
from drystone.schedule.decision import Decision, Memory, Wake
from drystone.schedule.prices.policy import PricesMemory

_KIND: Final = "$"
_HOME: Final = "drystone.schedule."
_IDLE_SECONDS: Final = 300.0  # between two notes while nothing is decided
_BYTES_PER_SECOND: Final = 1000.0  # that the log grows by because of this, at most


class MemoryKeeper:
    """Writes down what a policy remembers, and reads it after a restart."""

    def __init__(self, journal: Journal, policy: str) -> None:
        self._journal, self._policy = journal, policy

    def note(self, decisions: Sequence[Decision], memory: Memory) -> list[Remembered]:
        """What is to be written together with decisions; nothing where it was done just before."""
        now, last = self._journal.now(), self._journal.live.remembered
        if last is not None:
            is_idle = all(isinstance(decision, Wake) for decision in decisions)
            wait = max(_IDLE_SECONDS * is_idle, len(last.memory) / _BYTES_PER_SECOND)
            if now - last.time_seconds < wait:
                return []
        text = dump_memory(memory)
        if text is None:
            return []
        return [
            Remembered(time_seconds=now, policy=self._policy, setting=self._setting, memory=text)
        ]

    def recall(self) -> Memory:
        """What the policy remembered last; None where it was another one, or nothing is known."""
        last = self._journal.live.remembered
        if last is None or (last.policy, last.setting) != (self._policy, self._setting):
            return None
        return load_memory(last.memory)

    @property
    def _setting(self) -> str:
        """With other GPU types prices mean something else, with another budget savings do."""
        renting = self._journal.renting
        budget = renting.budget_dollars_per_hour if renting else math.inf
        # Policies see a GPU type for each place with spot nodes (`schedule/spot_places.py`).
        spots = [offer.name for offer in (renting.offers if renting else ()) if offer.is_spot]
        return f"{','.join([*self._journal.gpu_types, *spots])} {budget:g}"


def dump_memory(memory: Memory) -> str | None:
    """One line of JSON; None for what is not remembered."""
    if isinstance(memory, BudgetMemory):
        memory = dataclasses.replace(
            memory,
            arrivals=first_arrivals(memory.time_seconds),
            belief=None,
            picks={},
            overload=None,
            is_overloaded=False,
        )
    elif not isinstance(memory, PricesMemory):
        return None
    return json.dumps(_to_plain(memory), allow_nan=False)


def load_memory(text: str) -> Memory:
    """What `dump_memory` wrote; None where it was of another version."""
    try:
        return _from_plain(json.loads(text))
    except (ValueError, KeyError, TypeError, AttributeError, ImportError, InvalidSpec):
        return None


def _to_plain(value: Any) -> Any:
    if isinstance(value, np.generic):
        value = value.item()
    if value is None or isinstance(value, bool | int | str):
        return value
    if isinstance(value, float):
        return value if math.isfinite(value) else {_KIND: "float", "of": str(value)}
    if isinstance(value, np.ndarray):
        return {_KIND: "array", "dtype": str(value.dtype), "of": _to_plain(value.tolist())}
    if isinstance(value, list):
        return [_to_plain(item) for item in value]
    if isinstance(value, Mapping):
        pairs = [[_to_plain(key), _to_plain(item)] for key, item in value.items()]
        return {_KIND: "map", "of": pairs}
    if dataclasses.is_dataclass(value):
        table = {field.name: getattr(value, field.name) for field in dataclasses.fields(value)}
    elif isinstance(value, tuple) and hasattr(value, "_asdict"):
        table = value._asdict()
    elif isinstance(value, tuple | frozenset):
        return {_KIND: type(value).__name__, "of": [_to_plain(item) for item in value]}
    else:
        raise InvalidSpec(f"a {type(value).__name__} in the memory of a policy cannot be written")
    name = f"{type(value).__module__}:{type(value).__qualname__}"
    return {_KIND: name, "of": {key: _to_plain(item) for key, item in table.items()}}


def _from_plain(value: Any) -> Any:
    if isinstance(value, list):
        return [_from_plain(item) for item in value]
    if not isinstance(value, dict):
        return value
    kind, of = value[_KIND], value["of"]
    match kind:
        case "float":
            return float(of)
        case "array":
            return np.array(_from_plain(of), dtype=_array_type(value["dtype"]))
        case "map":
            return {_from_plain(key): _from_plain(item) for key, item in of}
        case "tuple":
            return tuple(_from_plain(item) for item in of)
        case "frozenset":
            return frozenset(_from_plain(item) for item in of)
    module, _, name = kind.partition(":")
    if not module.startswith(_HOME):
        raise InvalidSpec(f"{kind} is no memory of a policy")
    made = getattr(import_module(module), name)
    if not isinstance(made, type):
        raise InvalidSpec(f"{kind} is no memory of a policy")
    return made(**{field: _from_plain(item) for field, item in of.items()})


def _array_type(name: str) -> np.dtype[Any]:
    """The type of an array's numbers; nothing that runs code when it is read."""
    if name not in ("float64", "int64", "bool"):
        raise InvalidSpec(f"memory of a policy has an array of {name}")
    return np.dtype(name)
