"""`table`, `fits`, and the page of needs."""

import json
from pathlib import Path

import pytest
import yaml

from drystone.cli.main import run

ROOT = Path(__file__).parents[3]
AXOLOTL = (ROOT / "examples" / "configs" / "axolotl.yaml").read_text()


def test_a_table_has_a_row_for_each_gpu_type_and_way_of_training(capsys, tmp_path):
    words = ["table", "qwen3-0.6b", "--gpus", "RTX-4090,H100", "--seq-len", "2048"]
    assert run([*words, "--json"]) == 0
    rows = json.loads(capsys.readouterr().out)
    assert [(row["tuning"], row["gpu"]) for row in rows] == [
        (tuning, gpu)
        for tuning in ("full", "lora", "qlora")
        for gpu in ("RTX-4090", "H100-80GB-SXM")
    ]
    for row in rows:
        assert 0 < row["low_bytes"] < row["high_bytes"]
        assert 0 < row["low_tokens_per_second"] < row["high_tokens_per_second"]
    assert run([*words, "-o", str(tmp_path / "needs.html")]) == 0
    assert (tmp_path / "needs.html").read_text().count("<tr>") == 1 + len(rows)


def test_the_page_of_needs_is_what_the_planner_says_now(capsys):
    lines = [line for line in (ROOT / "docs" / "needs.md").read_text().splitlines() if "|" in line]
    cells = [[cell.strip() for cell in line.strip("|").split("|")] for line in lines[2:]]
    assert len({row[0] for row in cells}) == 20
    assert run(["table", "qwen3-4b", "--gpus", "RTX-4090,L40S,A100-80G,H100,B200", "--json"]) == 0
    now = json.loads(capsys.readouterr().out)
    mine = [row for row in cells if row[0] == "qwen3-4b"]
    assert [(row[1], row[3].split(" x ")[1]) for row in mine] == [
        (row["tuning"], row["gpu"]) for row in now
    ]
    for told, row in zip(mine, now, strict=True):  # `make needs` writes the page anew
        pace = float(told[6].split(" to ")[0].replace(",", "")) / int(told[3].split(" ")[0])
        assert pace == pytest.approx(row["low_tokens_per_second"] / row["num_gpus"], rel=0.3)


@pytest.mark.parametrize(
    ("line", "code", "told"),
    [
        ("# drystone: 4xA100-80G", 0, "fits 4xA100-80G"),
        ("# drystone: gpus = 1xT4", 3, "DOES NOT FIT 1xT4"),
        ("", 0, ""),
    ],
)
def test_a_config_is_judged_by_the_gpus_that_it_names(line, code, told, capsys, tmp_path):
    path = tmp_path / "train.yaml"
    path.write_text(f"{line}\n{AXOLOTL}")
    assert run(["fits", str(path)]) == code
    assert told in capsys.readouterr().out


def test_the_hook_and_the_action_run_that_command():
    [hook] = yaml.safe_load((ROOT / ".pre-commit-hooks.yaml").read_text())
    assert hook["entry"] == "drystone fits"
    action = yaml.safe_load((ROOT / "action.yml").read_text())
    assert any("drystone fits $FILES" in step["run"] for step in action["runs"]["steps"])
    for step in action["runs"]["steps"]:  # what a caller writes reaches the shell as data only
        assert "${{" not in step["run"]
