import json
from pathlib import Path

import pytest

from drystone.cli.main import run

TESTS = Path(__file__).resolve().parents[2]
ARENA = [
    "simulate",
    "--trace", str(TESTS / "data" / "arena_pai.csv"),
    "--cluster", str(TESTS / "golden" / "arena_cluster.yaml"),
    "--speeds", str(TESTS / "data" / "arena_speeds.csv"),
    "--arena",
]  # fmt: skip


def test_policies_stand_side_by_side(capsys):
    assert run([*ARENA, "--most-jobs", "30", "--policy", "prices,fifo"]) == 0

    shown = capsys.readouterr().out
    assert "30 jobs on 1280 GPUs" in shown
    assert "prices" in shown
    assert "30/30" in shown


def test_json_has_a_report_for_each_policy(capsys):
    assert run([*ARENA, "--policy", "fifo,shortest", "--json"]) == 0

    payload = json.loads(capsys.readouterr().out)
    assert payload["num_gpus"] == 1280
    assert [one["policy"] for one in payload["reports"]] == ["fifo", "shortest"]
    assert payload["reports"][0]["num_done"] == 125


def test_the_log_is_saved_and_reads_back(tmp_path: Path, capsys):
    from drystone.run.events import parse_events

    assert (
        run([*ARENA, "--most-jobs", "5", "--policy", "fifo", "--save-log", f"{tmp_path}/log"]) == 0
    )

    lines = (tmp_path / "log.fifo.jsonl").read_text(encoding="utf-8").splitlines()
    assert len(list(parse_events(lines))) == 15


def test_without_speeds_jobs_take_as_long_as_the_trace_says(tmp_path: Path, capsys):
    text = "job_id,submit_time_s,num_gpus,duration_s\na,5,2,100\nb,9,64,10\n"
    (tmp_path / "t.csv").write_text(text, encoding="utf-8")
    (tmp_path / "c.yaml").write_text("nodes: [{gpu: T4, gpus_per_node: 4}]", encoding="utf-8")
    files = ["--trace", f"{tmp_path}/t.csv", "--cluster", f"{tmp_path}/c.yaml"]

    wanted = ["--policy", "fifo,prices", "--restart-most-seconds", "0", "--json"]
    assert run(["simulate", *files, *wanted]) == 0

    for report in json.loads(capsys.readouterr().out)["reports"]:
        assert (report["num_done"], report["num_refused"]) == (1, 1)
        assert report["mean_completion_seconds"] == 100


def test_speeds_are_asked_for_where_a_trace_names_models(capsys):
    without = [one for one in ARENA if "speeds" not in one]
    assert run(without) == 2
    assert "--speeds" in capsys.readouterr().err


@pytest.mark.parametrize(
    ("extra", "says"),
    [
        (["--policy", "pricess"], "prices"),
        (["--policy", ","], "no policy"),
        (["--cluster", "nowhere.yaml"], "nowhere.yaml"),
    ],
)
def test_a_wrong_request_is_refused_with_a_hint(extra: list[str], says: str, capsys):
    assert run([*ARENA, *extra]) == 2
    assert says in capsys.readouterr().err
