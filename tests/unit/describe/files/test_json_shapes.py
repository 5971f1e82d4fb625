"""Dataclasses as JSON and back; what is wrong is said with its place."""

import json
from dataclasses import dataclass, field
from enum import IntEnum, StrEnum

import pytest

from drystone.describe.files.json_shapes import from_plain, to_plain
from drystone.describe.layout import Layout, Sharding
from drystone.describe.model import ModelSpec
from drystone.describe.model_source import find_model
from drystone.describe.recipe import Recipe, Recompute, RecomputeKind
from drystone.errors import InvalidSpec, UnknownName


class Colour(StrEnum):
    RED = "red"
    BLUE = "blue"


class Level(IntEnum):
    LOW = 1


@dataclass(frozen=True)
class Inner:
    number: int
    share: float = 0.5


@dataclass(frozen=True)
class Other:
    text: str


@dataclass(frozen=True)
class Outer:
    name: str
    colour: Colour
    inner: Inner
    either: Inner | Other
    level: Level = Level.LOW
    many: tuple[Inner, ...] = ()
    pair: tuple[int, str] = (1, "a")
    maybe: float | None = None
    on: bool = False
    table: dict[str, float] = field(default_factory=dict)


PLAIN = {"name": "x", "colour": "red", "inner": {"number": 1}, "either": {"text": "y"}}


def read(**changes) -> Outer:
    return from_plain(Outer, {**PLAIN, **changes}, where="file")


def test_defaults_are_filled_in():
    found = read()

    assert found == Outer(name="x", colour=Colour.RED, inner=Inner(1), either=Other("y"))


@pytest.mark.parametrize(
    "value",
    [
        Outer(
            name="x", colour=Colour.BLUE, inner=Inner(1, 0.25), either=Inner(3),
            many=(Inner(4), Inner(5)), pair=(7, "b"), maybe=1.5, on=True, table={"a": 1.0},
        ),
        Layout(dp=2, tp=4, sharding=Sharding.ZERO3, sequence_parallel=True),
        Recipe(seq_len=2048, global_batch=8, recompute=Recompute(kind=RecomputeKind.FULL, every=2)),
        find_model("llama-3.1-8b"),
        find_model("deepseek-v2-lite"),
        find_model("t5-large"),
    ],
    ids=lambda value: type(value).__name__,
)  # fmt: skip
def test_there_and_back(value):
    text = json.dumps(to_plain(value))

    assert from_plain(type(value), json.loads(text), where="file") == value


def test_every_kind_of_model_comes_back():
    for name in ("gpt2", "mixtral-8x7b", "gemma-2-9b", "bert-large-uncased"):
        model = find_model(name)
        assert from_plain(ModelSpec, to_plain(model), where="zoo") == model


def test_a_whole_number_is_a_number():
    assert read(maybe=2).maybe == 2.0
    assert isinstance(read(inner={"number": 1, "share": 1}).inner.share, float)


@pytest.mark.parametrize(
    ("changes", "where", "words"),
    [
        ({"name": 3}, "file.name", "must be a text"),
        ({"inner": {"number": 1.5}}, "file.inner.number", "must be a whole number"),
        ({"inner": {"number": True}}, "file.inner.number", "must be a whole number"),
        ({"inner": {"number": 1, "share": "half"}}, "file.inner.share", "must be a number"),
        ({"inner": 3}, "file.inner", "must be an object"),
        ({"inner": {}}, "file.inner", "number is missing"),
        ({"on": 1}, "file.on", "must be true or false"),
        ({"many": {}}, "file.many", "must be a list"),
        ({"many": [{"number": 1}, {"number": "2"}]}, "file.many[1].number", "whole number"),
        ({"pair": [1]}, "file.pair", "must have 2"),
        ({"pair": ["a", 1]}, "file.pair", "must be a whole number"),
        ({"table": {"a": "b"}}, "file.table", "must be a number"),
        ({"maybe": "x"}, "file.maybe", "must be a number"),
    ],
)
def test_what_is_wrong_is_said_with_its_place(changes, where, words):
    with pytest.raises(InvalidSpec, match=words) as caught:
        read(**changes)

    assert caught.value.where == where


def test_misspelt_keys_and_names_have_hints():
    with pytest.raises(UnknownName, match="numbr"):
        read(inner={"numbr": 1})
    with pytest.raises(UnknownName, match="rad"):
        read(colour="rad")
    with pytest.raises(InvalidSpec):
        read(either={"txt": "y"})
