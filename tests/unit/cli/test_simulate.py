import json
from pathlib import Path

import pytest
import typer

from drystone.cli.main import _build_app, run
from drystone.schedule.decision import POLICIES

EXAMPLES = Path(__file__).resolve().parents[3] / "examples" / "simulate"
JOBS, CLUSTER, MARKET = (
    str(EXAMPLES / name) for name in ("jobs.csv", "cluster.yaml", "market.yaml")
)
EMULATED = str(EXAMPLES.parent / "cluster_emulated.yaml")
EXAMPLE = ["simulate", "--trace", JOBS, "--cluster", CLUSTER, "--most-jobs", "8"]


def test_models_known_by_name_need_no_speeds(capsys):
    assert run([*EXAMPLE, "--policy", "prices,fifo"]) == 0

    shown = capsys.readouterr().out
    assert "8 jobs on 56 GPUs" in shown
    assert "prices: speeds estimated by Drystone, taken as true; lengths known." in shown
    assert "fifo: told nothing" in shown
    for label in (
        "done", "unfinished", "refused", "mean completion", "median", "99th percentile",
        "x lower bound", "queued", "makespan", "T4 used", "restarts", "spent", "fairness",
        "time a decision",
    ):  # fmt: skip
        assert label in shown


@pytest.mark.slow
def test_the_bound_that_knows_of_sharing_is_shown_where_it_is_asked_for(capsys):
    assert run([*EXAMPLE[:-1], "4", "--policy", "prices", "--bound", "--json"]) == 0
    report = json.loads(capsys.readouterr().out)["reports"][0]
    assert 1.0 <= report["shared_bound_ratio"] <= report["lower_bound_ratio"] + 1e-9

    assert run([*EXAMPLE, "--policy", "prices", "--market", MARKET, "--bound"]) == 2
    assert "Leave out --bound" in capsys.readouterr().err


def test_json_keeps_its_shape(capsys):
    assert run([*EXAMPLE, "--policy", "fifo", "--json"]) == 0

    found = json.loads(capsys.readouterr().out)
    assert set(found) == {
        "trace", "format", "cluster", "market", "num_jobs", "num_gpus", "settings", "notes",
        "information", "reports",
    }  # fmt: skip
    assert found["information"]["fifo"]["uses_speeds"] is False
    report = found["reports"][0]
    assert report["num_done"] + report["num_unfinished"] + report["num_refused"] == 8
    assert report["budget_dollars_per_hour"] is None
    assert {"fairness", "fairness_over", "spent_dollars", "gpu_hours"} <= set(report)


def test_jobs_that_only_fit_above_the_hard_cap_are_told(tmp_path: Path, capsys):
    market = tmp_path / "market.yaml"
    market.write_text(
        "offers:\n  - {name: a, gpu: A100-80G, num_gpus: 8, price_dollars_per_hour: 20}\n"
    )
    asked = ["simulate", "--trace", JOBS, "--market", str(market), "--most-jobs", "4", "--json"]
    found = {}
    for cap in ("19", "20"):
        assert run([*asked, "--policy", "budget", "--budget", "100", "--hard-cap", cap]) == 0
        found[cap] = json.loads(capsys.readouterr().out)

    told = "cost $20.00 an hour, and the hard cap is $19.00 an hour"
    assert [told in note for note in found["19"]["notes"] if "hard cap" in note] == [True]
    assert not [note for note in found["20"]["notes"] if "hard cap" in note]
    assert [found[cap]["reports"][0]["num_done"] for cap in ("19", "20")] == [0, 4]
    assert found["19"]["reports"][0]["spent_dollars"] == 0


def test_a_report_and_a_timeline_are_written(tmp_path: Path, capsys):
    page, timeline = tmp_path / "out.html", tmp_path / "trace.json"

    wanted = ["--policy", "prices", "--report", str(page), "--timeline", str(timeline)]
    assert run([*EXAMPLE, *wanted]) == 0

    assert page.read_text(encoding="utf-8").startswith("<!doctype html>")
    assert json.loads(timeline.read_text(encoding="utf-8"))["traceEvents"]


def test_each_of_several_policies_has_its_own_timeline(tmp_path: Path, capsys):
    wanted = ["--policy", "fifo,shortest", "--timeline", str(tmp_path / "trace.json")]

    assert run([*EXAMPLE, *wanted]) == 0

    assert sorted(one.name for one in tmp_path.iterdir()) == [
        "trace.fifo.json", "trace.shortest.json",
    ]  # fmt: skip


def test_sacct_output_is_simulated_with_its_assumption_stated(tmp_path: Path, capsys):
    text = (
        "JobID|User|Submit|ElapsedRaw|State|AllocTRES\n"
        "1|ann|2026-10-01T00:00:00|3600|COMPLETED|gres/gpu:a100=2\n"
        "1.0||2026-10-01T00:00:00|3600|COMPLETED|gres/gpu=2\n"
        "2|bob|2026-10-01T00:10:00|600|COMPLETED|gres/gpu:t4=1\n"
    )
    (tmp_path / "sacct.txt").write_text(text, encoding="utf-8")
    wanted = ["--policy", "fifo", "--restart-most-seconds", "0"]

    files = ["simulate", "--trace", str(tmp_path / "sacct.txt"), "--cluster", CLUSTER]
    assert run([*files, *wanted, "--json"]) == 0
    found = json.loads(capsys.readouterr().out)
    assert found["format"] == "sacct"
    assert found["reports"][0]["mean_completion_seconds"] == (3600 + 600) / 2

    assert run([*files, *wanted, "--scaling", "amdahl:0.1", "--type-speeds", "peak"]) == 0
    shown = capsys.readouterr().out
    assert "Amdahl's law, 10% serial" in shown
    assert "1 steps of jobs are left out" in shown


def test_a_market_alone_is_enough(capsys):
    files = ["simulate", "--trace", JOBS, "--market", MARKET, "--most-jobs", "4"]

    assert run([*files, "--policy", "budget", "--budget", "40", "--json"]) == 0

    found = json.loads(capsys.readouterr().out)
    assert found["num_gpus"] == 0
    assert found["reports"][0]["num_done"] == 4
    assert found["reports"][0]["spent_dollars"] > 0
    assert found["settings"]["budget_dollars_per_hour"] == 40


@pytest.mark.parametrize(
    ("extra", "says"),
    [
        (["--trace", JOBS], "--cluster"),
        (["--trace", JOBS, "--cluster", CLUSTER, "--budget", "3"], "--market"),
        (["--trace", JOBS, "--cluster", CLUSTER, "--scaling", "cubic"], "amdahl"),
        (["--trace", JOBS, "--cluster", CLUSTER, "--type-speeds", "odd"], "peak"),
        (["--trace", CLUSTER, "--cluster", CLUSTER], "no known trace"),
        (["--trace", JOBS, "--cluster", EMULATED], "line 4: nodes[0].emulate"),
        (["--trace", "/dev/null", "--cluster", CLUSTER], "is empty"),
        (["--trace", JOBS, "--cluster", CLUSTER, "--report", "/nowhere/o.html"], "no such folder"),
        (["--trace", JOBS, "--cluster", CLUSTER, "--timeline", "/tmp"], "is a folder"),
    ],
)
def test_a_wrong_request_is_refused_with_what_to_try(extra: list[str], says: str, capsys):
    assert run(["simulate", *extra]) == 2
    assert says in capsys.readouterr().err


def test_a_frontier_has_points_and_theory(tmp_path: Path, capsys):
    files = ["frontier", "--trace", JOBS, "--market", MARKET, "--most-jobs", "6"]
    wanted = ["--policy", "budget,fifo", "--budgets", "60,30"]

    assert run([*files, *wanted, "--json"]) == 0
    found = json.loads(capsys.readouterr().out)
    budgets = [(one["policy"], one["budget_dollars_per_hour"]) for one in found["points"]]
    assert budgets == [("budget", 30), ("budget", 60), ("fifo", 30), ("fifo", 60)]
    spend = found["theory"]["spend_dollars_per_hour"]
    assert spend == sorted(spend)
    assert found["target"] is None


@pytest.mark.slow
def test_a_frontier_is_read_the_other_way_and_drawn(tmp_path: Path, capsys):
    files = ["frontier", "--trace", JOBS, "--market", MARKET, "--most-jobs", "6"]
    wanted = ["--policy", "budget", "--budgets", "40", "--target-hours", "2"]

    assert run([*files, *wanted, "--plot", str(tmp_path / "f.svg")]) == 0

    shown, told = capsys.readouterr()
    assert told.splitlines()[-1] == f"Drawn: {tmp_path / 'f.svg'}"
    assert "in theory at least $" in shown
    assert "best possible" in shown
    assert (tmp_path / "f.svg").stat().st_size > 1000


def test_a_wrong_frontier_is_refused(capsys):
    files = ["frontier", "--trace", JOBS, "--market", MARKET, "--most-jobs", "6"]

    assert run([*files, "--budgets", "x"]) == 2
    assert run([*files, "--budgets", "0"]) == 2
    assert run([*files, "--target-hours", "0.0001"]) == 3


def test_the_help_names_policies_that_there_are():
    simulate = typer.main.get_command(_build_app(["simulate"])).commands["simulate"]
    told = next(one.help for one in simulate.params if one.name == "policy")
    named = told.partition(": ")[2].partition(", or a variant")[0].split(", ")

    assert len(named) >= 10
    assert set(named) <= set(POLICIES)
