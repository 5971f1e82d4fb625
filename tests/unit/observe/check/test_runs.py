"""Published runs: rows become runs, or say why they cannot."""

import csv
import re
from pathlib import Path

import pytest

from drystone.describe.layout import Sharding
from drystone.errors import UnreadableFile
from drystone.observe.check.accuracy import MEMORY_TABLE, SPEED_TABLE
from drystone.observe.check.runs import (
    MEMORY_COLUMNS,
    REQUIRED_COLUMNS,
    SPEED_COLUMNS,
    PublishedRun,
    SkippedRun,
    load_runs,
    parse_run,
)
from drystone.units import GiB

ROOT = Path(__file__).resolve().parents[4]

ROW = {
    "run_id": "mine-0001",
    "framework": "torchtitan FSDP2",
    "model": "Llama-3.1-8B",
    "arch": "llama",
    "layers": "32",
    "hidden": "4096",
    "heads": "32",
    "kv_heads": "8",
    "head_dim": "128",
    "ffn": "14336",
    "gated_mlp": "yes",
    "vocab": "128256",
    "tied_emb": "no",
    "seq_len": "8192",
    "gpu": "H100-80GB-SXM",
    "gpus": "8",
    "dp": "8",
    "sharding": "fsdp-full",
    "tp": "1",
    "pp": "1",
    "micro_batch": "2",
    "precision": "bf16-mixed",
    "recompute": "selective (op)",
    "tuning": "full (pretrain)",
    "mem_gib": "60.5",
    "kind": "reserved",
    "tokens_per_s_per_gpu": "5762",
}


def parsed(measure: str = "memory", **changes: str) -> PublishedRun:
    run = parse_run(ROW | changes, measure=measure)
    assert isinstance(run, PublishedRun), run
    return run


def reason(measure: str = "memory", **changes: str) -> str:
    run = parse_run(ROW | changes, measure=measure)
    assert isinstance(run, SkippedRun), run
    return run.reason


def write(path: Path, rows: list[dict[str, str]]) -> Path:
    with path.open("w", newline="", encoding="utf-8") as file:
        writer = csv.DictWriter(file, fieldnames=list(rows[0]))
        writer.writeheader()
        writer.writerows(rows)
    return path


def test_a_row_becomes_a_run():
    run = parsed()

    assert run.dataset == "mine"
    assert run.model.num_layers == 32
    assert run.layout.sharding is Sharding.ZERO3
    assert run.recipe.global_batch == 16
    assert run.measured_memory_bytes == 60.5 * GiB
    assert run.measured_tokens_per_second_per_gpu == 5762
    assert run.gpus_per_node == 8
    assert not run.ran_out_of_memory


@pytest.mark.parametrize(
    ("run_id", "dataset"),
    [
        ("torchtitan-0001", "torchtitan"),
        ("qwen1-0046", "qwen1"),
        ("lambda405b-0002", "lambda405b"),
        ("mine-0003b", "mine"),
        ("0001", "0001"),
    ],
)
def test_the_dataset_is_the_start_of_the_run_id(run_id, dataset):
    assert parsed(run_id=run_id).dataset == dataset


@pytest.mark.parametrize(
    ("changes", "expected"),
    [
        ({"notes": "SUSPECT: below the minimum"}, "marked SUSPECT"),
        ({"notes": "DO NOT USE"}, "marked DO NOT USE"),
        ({"config_complete": "no", "missing": "micro_batch"}, "incomplete: micro_batch"),
        ({"config_complete": "no"}, "incomplete: see notes"),
        ({"mem_gib": ""}, "no memory reading"),
        ({"mem_gib": "0"}, "no memory reading"),
        ({"mem_gib": "-3"}, "mem_gib: '-3' is not a number from 0 on"),
        ({"mem_gib": "nan"}, "mem_gib: 'nan' is not a number from 0 on"),
        ({"mem_gib": "much"}, "mem_gib: 'much' is not a number"),
        ({"layers": ""}, "column layers is empty"),
        ({"layers": "1e7"}, "10,000,000 are too many"),
        ({"heads": "0"}, "num_heads is 0, must be > 0"),
        ({"heads": "7.5"}, "heads: '7.5' is not a whole number"),
        ({"dp": "inf"}, "dp: 'inf' is not a number from 0 on"),
        ({"dp": "1e30"}, "dp: '1e30' is not a whole number up to 1,000,000,000"),
        ({"dp": "0"}, "dp is 0, must be 1 to"),
        ({"tp": "3"}, "32 attention heads are not divisible by tp=3"),
        (
            {"heads": "24", "kv_heads": "6", "tp": "4"},
            "6 key-value heads can be neither divided nor repeated by tp=4",
        ),
        ({"arch": "lstm"}, "architecture 'lstm' has no formula"),
        ({"arch": ""}, "the architecture is not stated"),
        ({"precision": "int8"}, "unknown precision 'int8'"),
        ({"recompute": "some"}, "unknown recomputation 'some'"),
        ({"sharding": "clever"}, "unknown sharding 'clever'"),
        ({"tuning": "IA3"}, "tuning method 'IA3' has no formula"),
    ],
)
def test_a_row_that_does_not_suffice_says_why(changes, expected):
    assert expected in reason(**changes)


def test_only_the_number_of_parameters_may_be_missing_for_it_is_counted():
    assert parsed(config_complete="no", missing="params")
    assert "params" in reason(config_complete="no", missing="params", arch="moe")


def test_a_run_without_a_reading_that_failed_is_a_run():
    run = parsed(kind="oom-boundary", mem_gib="")

    assert run.ran_out_of_memory
    assert run.measured_memory_bytes == 0


def test_speed_is_stated_or_follows_from_the_step_time():
    assert parsed("speed").measured_tokens_per_second_per_gpu == 5762
    by_time = parsed("speed", tokens_per_s_per_gpu="", step_time_s="4")
    assert by_time.measured_tokens_per_second_per_gpu == 16 * 8192 / 4 / 8
    no_gpus = parsed("speed", tokens_per_s_per_gpu="", step_time_s="4", gpus="0")
    assert no_gpus.measured_tokens_per_second_per_gpu == 16 * 8192 / 4 / 8


@pytest.mark.parametrize("step_time", ["", "0"])
def test_a_run_without_a_speed_is_skipped(step_time):
    changes = {"tokens_per_s_per_gpu": "", "step_time_s": step_time}

    assert reason("speed", **changes) == "no speed reading"


def test_notes_say_which_stage_was_read_and_whether_it_was_read_before():
    run = parsed(notes="last rank (tensorboard writer); same run as the preceding row")

    assert run.reports_last_stage
    assert run.is_second_reading
    assert not parsed().reports_last_stage


@pytest.mark.parametrize(
    ("gpus", "nodes", "expected"), [("8", "", 8), ("64", "", 8), ("12", "", 6), ("16", "4", 4)]
)
def test_gpus_stand_in_nodes_of_eight_unless_stated(gpus, nodes, expected):
    assert parsed(gpus=gpus, nodes=nodes, dp=gpus).gpus_per_node == expected


def test_gpus_of_an_nvlink_domain_stand_in_one_node():
    row = ROW | {"gpus": "64", "dp": "64", "gpu": "GB200-186GB", "gpu_spec_key": ""}
    run = parse_run(row, measure="memory")

    assert isinstance(run, PublishedRun)
    assert run.gpus_per_node == 64


def test_a_table_keeps_its_order_and_its_skipped_rows(tmp_path):
    rows = [ROW, ROW | {"run_id": "mine-0002", "layers": ""}, ROW | {"run_id": "mine-0003"}]
    runs = load_runs(write(tmp_path / "runs.csv", rows), measure="memory")

    assert [run.run_id for run in runs] == ["mine-0001", "mine-0002", "mine-0003"]
    assert [isinstance(run, SkippedRun) for run in runs] == [False, True, False]


def test_the_required_columns_suffice(tmp_path):
    names = REQUIRED_COLUMNS + MEMORY_COLUMNS
    rows = [{name: ROW[name] for name in names}]
    (run,) = load_runs(write(tmp_path / "runs.csv", rows), measure="memory")

    assert isinstance(run, PublishedRun)


def test_a_short_row_is_a_row_with_empty_columns(tmp_path):
    path = write(tmp_path / "runs.csv", [ROW])
    path.write_text(path.read_text().rstrip() + "\nmine-0002,torchtitan\n")

    assert isinstance(load_runs(path, measure="memory")[1], SkippedRun)


def test_every_column_that_is_read_is_documented():
    text = (ROOT / "docs" / "measurements.md").read_text(encoding="utf-8")
    files = ("runs.py", "columns.py", "recipe_columns.py")
    sources = [ROOT / "src/drystone/observe/check" / name for name in files]
    read = {
        name
        for path in sources
        for name in re.findall(r'row(?:\.get\(|\[|, )"(\w+)"', path.read_text(encoding="utf-8"))
    }
    names = read | {*REQUIRED_COLUMNS, *MEMORY_COLUMNS, *SPEED_COLUMNS}

    assert len(names) > 40
    assert [name for name in sorted(names) if f"`{name}`" not in text] == []


@pytest.mark.parametrize("name", ["run_id", "layers", "mem_gib", "kind"])
def test_a_missing_column_is_named(tmp_path, name):
    row = {key: value for key, value in ROW.items() if key != name}

    with pytest.raises(UnreadableFile, match=f"the column {name} is missing"):
        load_runs(write(tmp_path / "runs.csv", [row]), measure="memory")


def test_several_missing_columns_are_named_together(tmp_path):
    row = {key: value for key, value in ROW.items() if key not in ("dp", "tp")}

    with pytest.raises(UnreadableFile, match="the columns dp, tp are missing"):
        load_runs(write(tmp_path / "runs.csv", [row]), measure="speed")


@pytest.mark.parametrize("content", [b"", b"\xff\xfe\x00", b'run_id\n"' + b"x" * 200_000])
def test_a_file_that_is_no_table_is_refused(tmp_path, content):
    path = tmp_path / "runs.csv"
    path.write_bytes(content)

    with pytest.raises(UnreadableFile, match=r"runs\.csv"):
        load_runs(path, measure="memory")


def test_a_missing_file_is_refused(tmp_path):
    with pytest.raises(UnreadableFile, match="cannot be read as CSV"):
        load_runs(tmp_path / "none.csv", measure="memory")


@pytest.mark.parametrize(("table", "measure"), [(MEMORY_TABLE, "memory"), (SPEED_TABLE, "speed")])
def test_nine_of_ten_rows_that_ship_can_be_judged(table, measure):
    runs = load_runs(table, measure=measure)
    usable = sum(isinstance(run, PublishedRun) for run in runs)

    assert len(runs) > 1500
    assert usable / len(runs) > 0.9


def test_a_table_that_a_spreadsheet_saved_with_a_byte_order_mark_is_read(tmp_path):
    path = write(tmp_path / "runs.csv", [ROW])
    path.write_bytes(b"\xef\xbb\xbf" + path.read_bytes())

    assert isinstance(load_runs(path, measure="memory")[0], PublishedRun)
