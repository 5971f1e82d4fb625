"""The table of benchmarks, how its figures are judged, and what is written about them."""

import json
import re
import subprocess
import sys
from pathlib import Path

import pytest

sys.path.insert(0, str(Path(__file__).resolve().parents[3] / "benchmarks"))

from bench import measure as measuring
from bench.measure import Record, measure, reason_to_skip
from bench.render import render
from bench.spec import Benchmark, at_least, at_most, shown, within
from bench.store import Results, load_results, save_results
from bench.table_running import BENCHMARKS, PARTS
from bench.verdicts import judge, outside
from figures import print_figures, read_figures, read_skip

ROOT = Path(__file__).resolve().parents[3]
BENCHMARKS_FOLDER = ROOT / "benchmarks"
# Imported by others; choose_constants.py writes data of the package.
NO_BENCHMARKS = {"choose_constants.py", "figures.py", "renting_time.py", "runtime_replay.py"}
MACHINE = {"processor": "A processor, 2 cores", "memory": "8 GiB"}


def a_benchmark(**fields) -> Benchmark:
    given = {
        "name": "one",
        "about": "What?",
        "script": "one.py",
        "limit_seconds": 60,
        "figures": (at_most("seconds", "how long", 0.05, "ms", "aim", clock=True),),
    }
    return Benchmark(**(given | fields))


def a_record(**fields) -> Record:
    return Record(**({"name": "one", "date": "2026-11-16", "command": "python one.py"} | fields))


def script(tmp_path: Path, monkeypatch: pytest.MonkeyPatch, text: str) -> Benchmark:
    folder = tmp_path / "benchmarks"
    folder.mkdir()
    (folder / "one.py").write_text(text)
    monkeypatch.setattr(measuring, "ROOT", tmp_path)
    return a_benchmark()


def test_every_script_of_the_folder_stands_in_the_table():
    scripts = {path.name for path in BENCHMARKS_FOLDER.glob("*.py")} - NO_BENCHMARKS

    assert {one.script for one in BENCHMARKS.values()} == scripts


def test_names_are_unique_and_keys_too():
    assert len(BENCHMARKS) == sum(len(part.benchmarks) for part in PARTS)
    for one in BENCHMARKS.values():
        keys = [figure.key for figure in one.figures]
        assert len(keys) == len(set(keys)), one.name


@pytest.mark.parametrize("name", BENCHMARKS)
def test_a_script_hands_on_its_figures_and_takes_the_options_of_the_table(name: str):
    benchmark = BENCHMARKS[name]
    text = (BENCHMARKS_FOLDER / benchmark.script).read_text(encoding="utf-8")
    words = f"{benchmark.arguments} {benchmark.quick or ''}".split()

    assert "print_figures(" in text
    assert [one for one in words if one.startswith("--") and f'"{one}"' not in text] == []


def test_every_range_has_a_source_and_every_explanation_is_there():
    for one in BENCHMARKS.values():
        for figure in one.figures:
            has_range = figure.low is not None or figure.high is not None
            assert bool(figure.source) == has_range, (one.name, figure.key)
            if figure.known:
                assert (ROOT / figure.known.partition(",")[0]).is_file(), figure.known


def test_the_last_line_is_read_whatever_stands_before(capsys: pytest.CaptureFixture[str]):
    print_figures({"seconds": 1})
    print_figures({"seconds": 2, "curve": (1, 2.5)})
    output = "words\n" + capsys.readouterr().out

    assert read_figures(output) == {"seconds": 2.0, "curve": [1.0, 2.5]}
    assert read_figures("words\n") is None
    assert read_skip("words\nnot measured: no browser\n") == "no browser"


def test_what_is_no_number_is_no_figure():
    with pytest.raises(ValueError, match="not JSON compliant"):
        print_figures({"seconds": float("nan")})


@pytest.mark.parametrize(
    ("figure", "value", "is_inside", "found", "words"),
    [
        (at_most("k", "n", 0.05, "ms", "aim"), 0.05, True, "50.0 ms", "at most 50 ms"),
        (at_most("k", "n", 0.05, "ms", "aim"), 0.0501, False, "50.1 ms", "at most 50 ms"),
        (at_least("k", "n", 100, "x", "aim"), 10.5, False, "10.500 times", "at least 100 times"),
        (at_least("k", "n", 2e5, "/s", "aim"), 9e4, False, "90,000/s", "at least 200,000/s"),
        (within("k", "n", 0.95, 1.05, "x", "aim"), 1.0, True, "1.000 times", "0.95 to 1.05 times"),
        (within("k", "n", 0, 0, "", "aim"), 1.0, False, "1", "exactly 0"),
        (shown("k", "n", "%"), 0.123, True, "12.3 %", "none stated"),
        (at_most("k", "n", 0.01, "%", "aim"), 0.00004, True, "0.004 %", "at most 1 %"),
    ],
)
def test_figures_are_judged_and_shown_with_units(figure, value, is_inside, found, words):
    assert figure.is_inside(value) is is_inside
    assert figure.show(value) == found
    assert figure.show_range() == words


def test_a_figure_that_a_benchmark_does_not_print_counts_as_outside():
    record = a_record(figures={"other": 1.0})

    assert [one.word for one in outside(judge(a_benchmark(), record))] == ["**missing**"]
    assert judge(a_benchmark(), record, is_quick=True) == []


def test_figures_are_read_although_the_benchmark_ends_with_one(tmp_path, monkeypatch):
    benchmark = script(
        tmp_path, monkeypatch, 'print("figures: {\\"seconds\\": 0.2}"); raise SystemExit("slow")'
    )

    record = measure(benchmark, data=None, is_quick=False, commit="")

    assert record.figures == {"seconds": 0.2}
    assert record.failed == ""


def test_a_benchmark_without_figures_has_failed_and_says_why_without_paths(tmp_path, monkeypatch):
    benchmark = script(tmp_path, monkeypatch, f'raise ValueError("in {tmp_path}/x")')

    record = measure(benchmark, data=None, is_quick=False, commit="")

    assert record.failed == "exit code 1: ValueError: in .../x"


def test_a_benchmark_that_does_not_end_is_ended_with_what_it_started(tmp_path, monkeypatch):
    child = f"import time; open({str(tmp_path / 'child')!r}, 'w').close(); time.sleep(600)"
    benchmark = script(
        tmp_path, monkeypatch,
        f"import subprocess, sys\nsubprocess.run([sys.executable, '-c', {child!r}])",
    )  # fmt: skip
    benchmark = a_benchmark(limit_seconds=0.5, script=benchmark.script)
    # Who is told by whoever started it not to listen to interrupts (`nohup`, `&`) takes all of it.
    monkeypatch.setattr("bench.measure.LEAVE_SECONDS", 2.0)

    record = measure(benchmark, data=None, is_quick=False, commit="")

    assert record.failed == "had not ended after 0.5 s"
    listing = subprocess.run(["ps", "-eo", "args"], capture_output=True, text=True, check=True)
    assert str(tmp_path) not in listing.stdout


def test_what_is_missing_is_a_reason_with_a_way_out(tmp_path: Path):
    reading = a_benchmark(arguments="--data {data}")

    assert "needs no_such_package" in reason_to_skip(
        a_benchmark(needs=("no_such_package",)), data=None, is_quick=False
    )
    assert "DATA=DIR" in reason_to_skip(reading, data=None, is_quick=False)
    assert reason_to_skip(reading, data=tmp_path, is_quick=False) == ""
    assert "QUICK" in reason_to_skip(a_benchmark(), data=None, is_quick=True)


def test_results_are_kept_and_those_of_another_machine_are_not(tmp_path: Path):
    path = tmp_path / "results" / "figures.json"
    results = Results(MACHINE)
    results.add(a_record(figures={"seconds": 1.23456789}))
    results.add(a_record(skipped="no data"))
    save_results(results, path)

    assert load_results(MACHINE, path).records["one"].figures == {"seconds": 1.23457}
    assert load_results(MACHINE | {"memory": "9 GiB"}, path).records == {}


def test_results_of_other_versions_are_kept_and_say_so(tmp_path: Path):
    path = tmp_path / "figures.json"
    older, newer = ({**MACHINE, "packages": f"numpy 2.0, torch {minor}"} for minor in (2.12, 2.13))
    results = Results(older)
    results.add(a_record(name="help_time", figures={"help_seconds": 0.1}))
    save_results(results, path)
    again = load_results(newer, path)
    again.add(a_record(name="wire", packages=newer["packages"], figures={}))
    save_results(again, path)
    last = load_results(newer, path)

    assert last.records["help_time"].packages == older["packages"]
    assert "; with torch 2.12\n" in render(last, {})
    assert "; with torch 2.13" not in render(last, {})


def test_what_lies_outside_stands_first_with_the_load():
    results = Results(MACHINE)
    figures = {"help_seconds": 0.9, "times_python": 8.0, "help_cpu_seconds": 0.2}
    results.add(a_record(name="help_time", figures=figures, load=(16.5, 10.0)))
    results.add(a_record(name="sia", skipped="needs data"))
    results.add(a_record(name="wire", failed="exit code 1: broken"))
    text = render(results, {"growth.svg": "Growth"})
    short = text[text.index("## In short") : text.index("## Estimates")]

    assert "**0.90 s**, at most 0.3 s; by the clock, at load 16.5 to 10.0" in short
    assert "wire: exit code 1: broken, at load 0.0 to 0.0" in short
    assert "sia: needs data" in short
    assert "| best of ten ⏱ | 0.90 s | at most 0.3 s | **no** | aim |" in text
    assert "![Growth](results/growth.svg)" in text
    assert "without GPUs" in text


def test_what_is_committed_was_written_from_what_is_kept():
    kept = json.loads((BENCHMARKS_FOLDER / "results" / "figures.json").read_text("utf-8"))
    results = Results(
        kept["machine"], {one["name"]: Record.from_json(one) for one in kept["records"]}
    )
    written = (BENCHMARKS_FOLDER / "RESULTS.md").read_text(encoding="utf-8")
    names = re.findall(r"!\[(.*?)\]\(results/(.*?)\)", written)

    assert render(results, {name: title for title, name in names}) == written
    assert all((BENCHMARKS_FOLDER / "results" / name).is_file() for _, name in names)


def test_a_wrong_name_ends_with_two_and_a_hint():
    done = subprocess.run(
        [sys.executable, "-m", "bench", "--only", "plan_tme"], cwd=BENCHMARKS_FOLDER,
        capture_output=True, text=True, timeout=60, check=False,
    )  # fmt: skip

    assert done.returncode == 2
    assert "Did you mean 'plan_time'?" in done.stderr
