"""Configs that people published: facts of them (tests/data/public_configs.json), with links."""

import json
from collections import Counter
from dataclasses import fields
from pathlib import Path

import pytest
import yaml

from drystone.errors import DrystoneError
from drystone.plan.configs.read import _EVERY_TOOL as EVERY_TOOL
from drystone.plan.configs.read import read_configs
from drystone.plan.configs.setup import Setup
from drystone.plan.configs.write import nested
from drystone.plan.configs.write_degrees import FLAG_TOOLS

FACTS = json.loads((Path(__file__).parents[3] / "data" / "public_configs.json").read_text())
DOCUMENT = Path(__file__).parents[4] / "docs" / "configs.md"


def written(folder, fact):
    """A file that says what the published one says, as far as it matters here."""
    table, tool = fact["keys"], fact["tool"]
    if tool in FLAG_TOOLS or (tool == "megatron-bridge" and "recipe" in table):
        words = []
        for name, value in table.items():
            if name in ("CONFIG", "NGPU", "MODULE"):
                words.insert(0, f"{name}={value}")
            elif value is True:
                words.append(f"--{name}")
            elif value is not False:
                parts = value if isinstance(value, list) else [value]
                words.append(f"--{name} " + " ".join(map(str, parts)))
            elif "." in name:
                group, _, last = name.rpartition(".")
                words.append(f"--{group}.no-{last}")
        path = folder / "train.sh"
        path.write_text(" ".join(words) + "\n")
    else:
        path = folder / "train.yaml"
        path.write_text(yaml.safe_dump(nested(table)))
    return path


@pytest.mark.parametrize("fact", FACTS, ids=lambda fact: fact["link"].rpartition("/")[2])
def test_a_published_config_means_what_it_says(fact, tmp_path):
    path = written(tmp_path, fact)
    if "refused" in fact:
        with pytest.raises(DrystoneError) as refusal:
            read_configs([path], num_gpus=fact["gpus"])
        assert fact["refused"] in f"{refusal.value.where} {refusal.value.message}"
        return
    asked = read_configs([path], num_gpus=fact["gpus"])
    setup = asked.setup
    assert asked.tools[0] == fact["tool"]
    assert {
        "layout": str(setup.layout()),
        "batch": setup.global_batch(),
        "tokens": setup.seq_len,
        "precision": setup.precision.value,
        "recompute": str(setup.recompute),
        "tuning": setup.tuning.value,
    } == fact["means"]


def test_there_are_such_configs_of_every_trainer():
    counts = Counter(fact["tool"] for fact in FACTS)
    refused = Counter(fact["tool"] for fact in FACTS if "refused" in fact)
    for tool in ("axolotl", "trl", "torchtitan", "megatron-bridge"):
        assert counts[tool] >= 8
        assert refused[tool] <= 1
    assert refused["llama-factory"] <= 3  # preferences: refused by `stage`
    assert counts["nemo"] >= 8


def table_rows():
    """`| tool | `a`, `b` |` under "Keys that count"."""
    part = DOCUMENT.read_text().split("## Keys that count", 1)[1].split("\n## ", 1)[0]
    for line in part.splitlines():
        cells = [cell.strip() for cell in line.strip("|").split("|")]
        if len(cells) == 2 and cells[0] in EVERY_TOOL:
            yield cells[0], [word.strip("` ") for word in cells[1].split(",")]


def test_the_documents_name_the_keys_that_are_honoured():
    rows = dict(table_rows())
    assert set(rows) == set(EVERY_TOOL)
    known_fields = {entry.name for entry in fields(Setup)}
    for tool, names in rows.items():
        keys = EVERY_TOOL[tool].keys
        told = {key.name for key in keys if key.field in known_fields or key.field[0] == "_"}
        assert set(names) <= told, tool
        assert len(set(names)) >= min(20, len(told)), tool
