"""`drystone check`: every row is judged or skipped with a reason, and a broken table is refused."""

import csv
import json

import pytest

from drystone.cli.main import run
from drystone.observe.check.accuracy import MEMORY_TABLE, SPEED_TABLE


def few_rows(source, target, number=40):
    with source.open(newline="", encoding="utf-8") as file:
        rows = list(csv.DictReader(file))
    chosen = rows[:: max(1, len(rows) // number)]
    with target.open("w", newline="", encoding="utf-8") as file:
        writer = csv.DictWriter(file, rows[0])
        writer.writeheader()
        writer.writerows(chosen)
    return len(chosen)


@pytest.mark.parametrize(("measure", "table"), [("memory", MEMORY_TABLE), ("speed", SPEED_TABLE)])
def test_the_json_has_the_documented_shape(capsys, tmp_path, measure, table):
    number = few_rows(table, tmp_path / "rows.csv")
    assert run(["check", measure, "--rows", str(tmp_path / "rows.csv"), "--json"]) == 0
    report = json.loads(capsys.readouterr().out)

    for key in ("median_abs_error", "p90_abs_error", "bias", "by_dataset", "evaluated"):
        assert key in report
    assert report["rows"] == number
    assert {"caught", "missed", "warned", "fits_accepted", "fits_refused"} < set(report["oom"])
    assert report["left_out"]["all full"]["num_sources"] >= 1
    assert all(one["reason"] for one in report["skipped"])
    judged = {one["run_id"] for one in report["results"]}
    assert judged.isdisjoint(one["run_id"] for one in report["skipped"])


def test_people_see_tables_and_a_picture(capsys, tmp_path):
    few_rows(MEMORY_TABLE, tmp_path / "rows.csv")
    picture = tmp_path / "check.png"
    rows = str(tmp_path / "rows.csv")
    assert run(["check", "memory", "--rows", rows, "--plot", str(picture)]) == 0

    assert "median" in capsys.readouterr().out
    assert picture.read_bytes().startswith(b"\x89PNG")


def test_a_brief_report_has_groups_and_what_fits_only(capsys, tmp_path):
    few_rows(MEMORY_TABLE, tmp_path / "rows.csv")
    assert run(["check", "memory", "--rows", str(tmp_path / "rows.csv"), "--brief"]) == 0

    shown, told = capsys.readouterr()
    assert "median" in shown
    assert "By dataset" not in shown
    assert "worst" not in shown
    assert told == ""


def test_a_missing_column_is_named(capsys, tmp_path):
    few_rows(MEMORY_TABLE, tmp_path / "rows.csv")
    text = (tmp_path / "rows.csv").read_text().replace("micro_batch", "microbatch", 1)
    (tmp_path / "rows.csv").write_text(text)

    assert run(["check", "memory", "--rows", str(tmp_path / "rows.csv")]) == 2
    assert "micro_batch is missing" in capsys.readouterr().err


@pytest.mark.parametrize("content", [b"", b"\xff\xfe\x00\x01", b'"a\n'])
def test_what_is_no_table_is_refused(capsys, tmp_path, content):
    (tmp_path / "rows.csv").write_bytes(content)

    assert run(["check", "speed", "--rows", str(tmp_path / "rows.csv")]) == 2
    assert "rows.csv" in capsys.readouterr().err


def test_a_picture_of_unknown_kind_is_refused(capsys, tmp_path):
    few_rows(MEMORY_TABLE, tmp_path / "rows.csv")
    arguments = ["--rows", str(tmp_path / "rows.csv"), "--plot", str(tmp_path / "check.doc")]

    assert run(["check", "memory", *arguments]) == 2
    assert ".png" in capsys.readouterr().err
