"""Readings of one's own runs, in both forms."""

import csv
from pathlib import Path

import pytest

from drystone.describe.catalogue import find_gpu
from drystone.describe.layout import parse_layout
from drystone.describe.machine import default_machine
from drystone.describe.model_source import find_model
from drystone.describe.recipe import Recipe
from drystone.errors import InvalidSpec
from drystone.estimate.whole import estimate_layout
from drystone.observe.check.accuracy import SPEED_TABLE
from drystone.observe.check.readings import Asked, load_readings
from drystone.units import GiB

ASKED = Asked(
    model=find_model("llama-3-8b"),
    recipe=Recipe(seq_len=4096, global_batch=64),
    layout=parse_layout("dp=8,micro=1,zero=3"),
    machine=default_machine(find_gpu("A100-80G")),
)


def written(folder: Path, text: str) -> Path:
    path = folder / "runs.csv"
    path.write_text(text)
    return path


def test_a_short_table_is_of_the_run_that_is_asked_for(tmp_path: Path) -> None:
    plain = estimate_layout(ASKED.model, ASKED.recipe, ASKED.layout, ASKED.machine)
    seconds, size = plain.speed.step_seconds, plain.hungriest.reserved_bytes / GiB
    text = f"step_time_s,mem_gib,kind\n{2 * seconds},{1.5 * size},reserved\n"
    speed, memory = sorted(
        load_readings(written(tmp_path, text), ASKED), key=lambda one: -len(one.measure)
    )[::-1]
    assert speed.ratio == pytest.approx(2)
    assert memory.ratio == pytest.approx(1.5)
    assert speed.kind == memory.kind


def test_columns_say_where_a_run_differs(tmp_path: Path) -> None:
    text = 'step_time_s,gpu,layout\n9,H100,\n9,,\n9,,"dp=4,micro=1,zero=3"\n'
    other, same, narrow = load_readings(written(tmp_path, text), ASKED)
    assert other.gpu != same.gpu
    assert other.work == same.work == narrow.work
    assert narrow.run != same.run


def test_a_whole_table_describes_its_runs_by_itself(tmp_path: Path) -> None:
    with SPEED_TABLE.open(newline="") as file:
        rows = list(csv.DictReader(file))[:5]
    path = tmp_path / "table.csv"
    with path.open("w", newline="") as file:
        writer = csv.DictWriter(file, list(rows[0]))
        writer.writeheader()
        writer.writerows(rows)
    found = load_readings(path)
    assert found
    assert {reading.measure for reading in found} == {"speed"}
    assert all(0.2 < reading.ratio < 5 for reading in found)


@pytest.mark.parametrize(
    ("text", "told"),
    [("speed\n3\n", "no column"), ("step_time_s,layout\n3,dp=x\n", "line 2")],
)
def test_what_says_nothing_is_refused_with_its_place(tmp_path: Path, text: str, told: str) -> None:
    with pytest.raises(InvalidSpec, match=told):
        load_readings(written(tmp_path, text), ASKED)


def test_a_short_table_needs_a_run_that_is_asked_for(tmp_path: Path) -> None:
    with pytest.raises(InvalidSpec, match="whole runs"):
        load_readings(written(tmp_path, "step_time_s\n3\n"))
