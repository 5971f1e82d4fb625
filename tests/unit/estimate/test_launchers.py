"""Conventions of launchers: found by name, sound, and documented."""

from dataclasses import fields
from pathlib import Path

import pytest

from drystone.errors import UnknownName
from drystone.estimate.launchers import LAUNCHERS, Launcher, find_launcher
from drystone.observe.check.recipe_columns import _LAUNCHERS

ROOT = Path(__file__).resolve().parents[3]


def test_a_launcher_is_found_by_its_name():
    assert find_launcher("megatron-te").keeps_master
    assert not find_launcher("accelerate").keeps_master


def test_an_unknown_launcher_is_refused_with_a_hint():
    with pytest.raises(UnknownName, match="Did you mean 'megatron-te'"):
        find_launcher("megatron_te")


@pytest.mark.parametrize("launcher", LAUNCHERS.values(), ids=lambda one: one.name)
def test_every_launcher_is_sound(launcher: Launcher):
    assert launcher.bf16_gradient_bytes in (2, 4, 6)
    assert launcher.fp16_gradient_bytes in (2, 4)
    assert launcher.gated_tensors in (3.0, 4.0)
    assert 2 <= launcher.logits_bytes <= 16
    assert 2 <= launcher.fused_logits_bytes <= 16
    assert launcher.gathered_layers >= 1


def test_names_are_those_under_which_they_are_found():
    assert all(name == launcher.name for name, launcher in LAUNCHERS.items())


def test_every_framework_of_the_tables_has_a_known_launcher():
    assert {name for _, name in _LAUNCHERS} <= set(LAUNCHERS)


def test_every_field_and_every_launcher_is_documented():
    text = (ROOT / "docs" / "launchers.md").read_text(encoding="utf-8")
    names = [one.name for one in fields(Launcher) if one.name not in ("name", "speed")] + list(
        LAUNCHERS
    )

    assert [name for name in names if f"`{name}`" not in text] == []


def test_a_launcher_differs_from_the_documented_table_nowhere():
    """The table of docs/launchers.md has one row a field and one column a launcher."""
    text = (ROOT / "docs" / "launchers.md").read_text(encoding="utf-8")
    rows = [line for line in text.splitlines() if line.startswith("| `")]
    written = {}
    for row in rows:
        first, value, others = ([*row.strip("|").split("|"), "", ""])[:3]
        written[first.strip().strip("`")] = (value.strip(), others.strip())

    for field in fields(Launcher):
        if field.name in ("name", "speed"):  # docs/speed.md has the numbers of speed
            continue
        values = {name: getattr(one, field.name) for name, one in LAUNCHERS.items()}
        usual, exceptions = written[field.name]
        for name, value in values.items():
            says = next(
                (part.split("`")[0] for part in exceptions.split("; ") if f"`{name}`" in part),
                usual,
            )
            assert says.strip() == render(value), f"{field.name} of {name}"


def render(value: object) -> str:
    """A value as the document writes it."""
    if isinstance(value, bool):
        return "yes" if value else "no"
    return f"{value:g}"
