import json
from pathlib import Path

from drystone.cli.main import run
from drystone.cli.trace import draw_bars


def test_a_trace_is_made_and_shown(tmp_path: Path, capsys):
    path = str(tmp_path / "t.csv")

    assert run(["trace", "generate", "--jobs", "20", "--seed", "3", "--out", path]) == 0
    assert run(["trace", "show", path]) == 0
    shown = capsys.readouterr().out

    assert "20 jobs" in shown
    assert "Arrivals" in shown


def test_a_trace_goes_to_standard_output(capsys):
    assert run(["trace", "generate", "--jobs", "3", "--mix", "gpt2"]) == 0

    lines = capsys.readouterr().out.splitlines()
    assert lines[0].startswith("id,submit_seconds,model,total_samples")
    assert len(lines) == 4


def test_sacct_is_converted_and_what_is_left_out_is_said(tmp_path: Path, capsys):
    text = (
        "JobID|User|Submit|ElapsedRaw|AllocTRES\n"
        "1|ann|2026-10-01T00:00:00|100|gres/gpu:a100=2\n2|ann|2026-10-01T00:00:00|100|cpu=2\n"
    )
    (tmp_path / "s.txt").write_text(text, encoding="utf-8")

    assert run(["trace", "convert", str(tmp_path / "s.txt")]) == 0

    printed = capsys.readouterr()
    assert "1,0,,200," in printed.out
    assert "1 jobs without GPUs are left out" in printed.err


def test_the_summary_has_a_form_for_programs(tmp_path: Path, capsys):
    text = "job_id,submit_time_s,num_gpus,duration_s\na,0,2,3600\nb,7200,1,1800\n"
    (tmp_path / "t.csv").write_text(text, encoding="utf-8")

    assert run(["trace", "show", str(tmp_path / "t.csv"), "--json"]) == 0

    found = json.loads(capsys.readouterr().out)
    assert (found["num_jobs"], found["span_seconds"], found["gpu_hours"]) == (2, 7200, 2.5)
    assert sum(found["arrivals_per_bin"]) == 2
    assert found["jobs_by_num_gpus"] == {"1": 1, "2": 1}


def test_bars_are_as_tall_as_they_should_be():
    assert draw_bars([0, 1, 8], height=1) == [" ▁█"]
    assert draw_bars([1, 16], height=2) == [" █", "▁█"]


def test_a_wrong_request_is_refused(capsys):
    assert run(["trace", "generate", "--arrivals", "never"]) == 2
    assert "poisson" in capsys.readouterr().err
