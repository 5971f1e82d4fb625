"""Reads single values of a `config.json` and says plainly which one is missing or wrong."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from dataclasses import dataclass, field
from typing import Any

from drystone.errors import InvalidSpec

LARGEST_VALUE = 10**9
LARGEST_NUMBER = 1e30
MOST_LAYERS = 10_000


@dataclass(frozen=True, slots=True)
class ConfigReader:
    """One config, the place it came from, and the name of the model.

    Keys are tried in order; a key that is absent or null gives the default, and without a
    default it is an error. A key that is there must hold what it should.
    """

    config: Mapping[str, Any]
    where: str
    name: str
    used: set[str] = field(default_factory=set)  # keys that were asked for

    def size(self, *keys: str, default: int | None = None, most: int = LARGEST_VALUE) -> int:
        """A whole number of at least 1."""
        return self._whole(keys, default, least=1, most=most)

    def count(self, *keys: str, default: int | None = 0, most: int = LARGEST_VALUE) -> int:
        """A whole number that may be 0."""
        return self._whole(keys, default, least=0, most=most)

    def num_layers(self, *keys: str, default: int | None = None) -> int:
        """How many layers; bounded, because some families describe each one."""
        return self.size(*(keys or ("num_hidden_layers",)), default=default, most=MOST_LAYERS)

    def flag(self, key: str, *, default: bool) -> bool:
        """True or false."""
        value = self._get(key)
        if value is None:
            return default
        if not isinstance(value, bool):
            raise self._wrong(key, value, "true or false")
        return value

    def text(self, *keys: str, default: str = "") -> str:
        """A string."""
        key, value = self._first(keys)
        if value is None:
            return default
        if not isinstance(value, str):
            raise self._wrong(key, value, "a string")
        return value

    def number(self, *keys: str, default: float) -> float:
        """A number above 0."""
        key, value = self._first(keys)
        if value is None:
            return default
        is_number = isinstance(value, int | float) and not isinstance(value, bool)
        if not is_number or not 0 < value < LARGEST_NUMBER:
            raise self._wrong(key, value, "a number above 0")
        return float(value)

    def numbers(self, key: str) -> tuple[float, ...]:
        """A list of numbers above 0; absent means none."""
        value = self._get(key)
        if value is None:
            return ()
        if not isinstance(value, list):
            raise self._wrong(key, value, "a list of numbers above 0")
        table = ConfigReader({str(at): one for at, one in enumerate(value)}, self.where, self.name)
        return tuple(table.number(at, default=1.0) for at in table.config)

    def each_layer(self, key: str, num_layers: int, default: Callable[[int], str]) -> list[str]:
        """One string per layer: a list in the config, or else what the default says of each."""
        value = self._get(key)
        if value is None:
            return [default(index) for index in range(num_layers)]
        if not isinstance(value, list) or len(value) != num_layers:
            raise self._wrong(key, value, f"a list of {num_layers} strings, one for each layer")
        for entry in value:
            if not isinstance(entry, str):
                raise self._wrong(key, entry, "a list of strings")
        return value

    def indices(self, key: str) -> frozenset[int]:
        """A list of layer numbers; absent means none."""
        value = self._get(key)
        if value is None:
            return frozenset()
        if not isinstance(value, list):
            raise self._wrong(key, value, "a list of layer numbers")
        for entry in value:
            if isinstance(entry, bool) or not isinstance(entry, int):
                raise self._wrong(key, entry, "a list of layer numbers")
        return frozenset(value)

    def table(self, key: str) -> ConfigReader:
        """A config within this one; absent means empty."""
        value = self._get(key)
        if value is None:
            value = {}
        if not isinstance(value, Mapping):
            raise self._wrong(key, value, "an object")
        return ConfigReader(value, f"{self.where}: {key}", self.name)

    def is_null(self, key: str) -> bool:
        """Whether the key is there and says null, which some families tell apart from absent."""
        return key in self.config and self._get(key) is None

    def head_dim(self, hidden_size: int, num_heads: int, *, default: int = 0) -> int:
        """Channels of one head: as written, or else an even share of the hidden size."""
        if self._get("head_dim") is not None:
            return self.size("head_dim")
        if default and not self.is_null("head_dim"):
            return default
        if hidden_size % num_heads:
            raise InvalidSpec(
                f"{num_heads} attention heads do not divide the hidden size {hidden_size}",
                where=self.where,
                hint="Correct one of the two, or state head_dim",
            )
        return hidden_size // num_heads

    def kv_heads(self, num_heads: int, *, default: int = 0) -> int:
        """Key-value heads; null means as many as heads, absent what the architecture says."""
        if self.is_null("num_key_value_heads"):
            return num_heads
        return self.size("num_key_value_heads", default=default or num_heads)

    def num_classes(self) -> int:
        """Classes of a classifier: `transformers` writes them as id2label, and assumes two."""
        labels = self._get("id2label")
        if isinstance(labels, Mapping) and labels:
            return len(labels)
        return self.size("num_labels", default=2)

    def _get(self, key: str) -> Any:
        self.used.add(key)
        return self.config.get(key)

    def _first(self, keys: tuple[str, ...]) -> tuple[str, Any]:
        self.used.update(keys)
        for key in keys:
            if self.config.get(key) is not None:
                return key, self.config[key]
        return keys[0], None

    def _whole(self, keys: tuple[str, ...], default: int | None, *, least: int, most: int) -> int:
        key, value = self._first(keys)
        if value is None:
            if default is None:
                raise self._missing(keys)
            return default
        if isinstance(value, float) and value.is_integer():
            value = int(value)
        if isinstance(value, bool) or not isinstance(value, int) or not least <= value <= most:
            raise self._wrong(key, value, f"a whole number from {least} to {most}")
        return value

    def _missing(self, keys: tuple[str, ...]) -> InvalidSpec:
        others = f" (also known as {', '.join(keys[1:])})" if len(keys) > 1 else ""
        return InvalidSpec(
            f"key {keys[0]!r}{others} is missing",
            where=self.where,
            hint="Use the config.json that was published with the model, or add the key",
        )

    def _wrong(self, key: str, value: object, wanted: str) -> InvalidSpec:
        return InvalidSpec(
            f"{key} is {shorten(value)}, must be {wanted}",
            where=self.where,
            hint="Compare it with the config.json that was published with the model",
        )


def shorten(value: object, most: int = 60) -> str:
    """A value as one short line for a message, however large or deep it is."""
    if isinstance(value, int) and not isinstance(value, bool) and value.bit_length() > 128:
        return f"a number of {value.bit_length()} bits"
    if isinstance(value, Mapping | list):
        kind = "a list" if isinstance(value, list) else "an object"
        return f"{kind} of {len(value)} entries"
    text = repr(value[: most + 1] if isinstance(value, str) else value)
    return text if len(text) <= most else text[:most] + "..."
