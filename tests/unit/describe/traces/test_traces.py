import math
from dataclasses import replace
from pathlib import Path

import pytest

from drystone.describe.files.cluster import load_cluster
from drystone.describe.traces.speeds import MeasuredStep, fill_sizes, load_speeds
from drystone.describe.traces.trace import load_trace
from drystone.errors import RequestError
from drystone.schedule.options import duration_options, measured_options

TESTS = Path(__file__).resolve().parents[3]


def write(path: Path, text: str) -> Path:
    path.write_text(text, encoding="utf-8")
    return path


def test_our_own_format_needs_four_columns(tmp_path: Path):
    text = "id,submit_seconds,model,total_samples\nb,70,m,5\na,60,m,10\n"

    jobs = load_trace(write(tmp_path / "t.csv", text))

    assert [(job.id, job.submit_seconds, job.total_samples) for job in jobs] == [
        ("a", 0.0, 10.0),
        ("b", 10.0, 5.0),
    ]
    assert jobs[0].deadline_seconds == math.inf


def test_limits_are_read(tmp_path: Path):
    text = (
        "id,submit_seconds,model,total_samples,allowed_gpus,min_gpus,max_gpus,priority\n"
        "a,0,m,10,A100+V100,2,8,3\n"
    )
    job = load_trace(write(tmp_path / "t.csv", text))[0]

    assert job.allowed_gpus == {"A100", "V100"}
    assert job.allows("A100", 8)
    assert not job.allows("A100", 1)
    assert not job.allows("A40", 4)
    assert job.priority == 3


def test_arenas_trace_has_its_jobs():
    jobs = load_trace(TESTS / "data" / "arena_philly.csv", divide_work=5)

    assert len(jobs) == 1938
    assert jobs[0].total_samples == 119965 // 5 * 256
    assert (jobs[0].requested_gpu, jobs[0].requested_count) == ("A40", 4)


@pytest.mark.parametrize(
    "text",
    [
        "",
        "x,y\n1,2\n",
        "id,submit_seconds,model,total_samples\n",
        "id,submit_seconds,model,total_samples\na,soon,m,1\n",
        "id,submit_seconds,model,total_samples\na,0,m,0\n",
        "id,submit_seconds,model,total_samples\na,0,m,1\na,0,m,1\n",
        "id,submit_seconds,model,total_samples,prioritty\na,0,m,1,1\n",
    ],
)
def test_a_wrong_trace_is_refused_in_words(tmp_path: Path, text: str):
    with pytest.raises(RequestError) as refusal:
        load_trace(write(tmp_path / "t.csv", text))
    assert "t.csv" in str(refusal.value)


def test_a_cluster_file_names_its_nodes(tmp_path: Path):
    text = "nodes:\n  - {gpu: A100, count: 2, gpus_per_node: 8}\n  - {gpu: T4}\n"

    nodes = load_cluster(write(tmp_path / "c.yaml", text))

    assert [(one.gpu, one.num_gpus) for one in nodes] == [("A100", 8), ("A100", 8), ("T4", 1)]
    assert len({one.id for one in nodes}) == 3


def test_nodes_of_a_simulation_may_have_names_and_types_of_their_own(tmp_path: Path):
    text = "nodes: [{gpu: X1, name: big}, {gpu: A40, count: 2, name: old}, {gpu: A40}]\nprices: {}"

    nodes = load_cluster(write(tmp_path / "c.yaml", text))

    assert [node.id for node in nodes] == ["big", "old-1", "old-2", "A40-0003"]
    assert nodes[0].gpu == "X1"


def test_a_misspelt_key_of_a_simulated_cluster_is_an_error_with_its_line(tmp_path: Path):
    for text in ("nodes: [{gpu: A100}]\npricse: {A100: 1}", "nodes:\n- {gpu: A100, cuont: 2}"):
        with pytest.raises(RequestError, match=r"line 2.*unknown key.*(prices|count)"):
            load_cluster(write(tmp_path / "c.yaml", text))
    with pytest.raises(RequestError, match="emulated devices are for `drystone serve`"):
        load_cluster(write(tmp_path / "c.yaml", "nodes: [{gpu: A100, emulate: {}}]"))


@pytest.mark.parametrize("text", ["", "[]", "nodes: []", "nodes: [{gpuu: A}]", "nodes: [{gpu: 1}]"])
def test_a_wrong_cluster_is_refused(tmp_path: Path, text: str):
    with pytest.raises(RequestError):
        load_cluster(write(tmp_path / "c.yaml", text))


def test_arenas_speeds_are_all_there():
    steps = load_speeds(TESTS / "data" / "arena_speeds.csv")

    assert len(steps) == 329
    assert sum(one.succeeded for one in steps) == 318


def test_an_unmeasured_size_is_taken_from_the_next_larger():
    def step(model: str, seconds: float) -> MeasuredStep:
        return MeasuredStep(
            model=model, global_batch=100, gpu="A", num_gpus=1, num_nodes=1, step_seconds=seconds
        )

    filled = {one.model: one.step_seconds for one in fill_sizes([step("moe_2.4B", 9.0)])}
    failed = fill_sizes([step("moe_2.4B", -1.0)])

    assert filled == {
        "moe_2.4B": pytest.approx(9.0, abs=0.001),
        "moe_1.3B": pytest.approx(5.0, abs=0.001),
        "moe_690M": pytest.approx(2.778, abs=0.001),
    }
    assert failed == ()


def test_options_are_measured_on_as_few_nodes_as_possible():
    nodes = load_cluster(TESTS / "golden" / "arena_cluster.yaml")
    steps = load_speeds(TESTS / "data" / "arena_speeds.csv")
    job = load_trace(TESTS / "data" / "arena_philly.csv")[0]

    options = measured_options(steps, nodes)(job)

    assert options.counts.sum(axis=1).min() >= 1
    assert ((options.counts > 0).sum(axis=1) == 1).all()
    assert len({tuple(row) for row in options.counts.tolist()}) == len(options)


def test_a_trace_of_durations_needs_no_speeds(tmp_path: Path):
    text = "job_id,submit_time_s,num_gpus,duration_s,vc\na,5,2,100,x\nb,9,64,10,y\n"
    small = load_cluster(
        write(tmp_path / "c.yaml", "nodes: [{gpu: T4, count: 4, gpus_per_node: 4}]")
    )

    first, second = load_trace(write(tmp_path / "t.csv", text))

    options = duration_options(small)(first)
    assert (options.counts.tolist(), options.samples_per_second.tolist()) == ([[2]], [2.0])
    assert first.total_samples / 2.0 == 100
    assert len(duration_options(small)(second)) == 0


def test_limits_of_a_job_leave_out_options():
    nodes = load_cluster(TESTS / "golden" / "arena_cluster.yaml")
    steps = load_speeds(TESTS / "data" / "arena_speeds.csv")
    job = load_trace(TESTS / "data" / "arena_philly.csv")[0]
    options_of = measured_options(steps, nodes)

    limited = options_of(replace(job, allowed_gpus=frozenset({"A100", "V100"}), max_gpus=8))

    assert 0 < len(limited) < len(options_of(job))
    assert limited.counts[:, 2:].sum() == 0
    assert limited.counts.sum(axis=1).max() <= 8


def test_work_that_nobody_measured_is_named():
    nodes = load_cluster(TESTS / "golden" / "arena_cluster.yaml")
    job = load_trace(TESTS / "data" / "arena_philly.csv")[0]

    with pytest.raises(RequestError, match=r"bert_2\.6B, batch 256"):
        measured_options([], nodes)(job)
