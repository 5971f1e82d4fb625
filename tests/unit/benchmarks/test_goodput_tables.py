"""Step times by placement, gradient noise and workloads, read from files; wrong ones say where."""

import sys
from pathlib import Path

import pytest

from drystone.errors import InvalidSpec, UnknownName, UnreadableFile

sys.path.insert(0, str(Path(__file__).resolve().parents[3] / "benchmarks"))

from goodput.tables import (
    list_workloads,
    load_noise,
    load_placed_steps,
    load_workload,
)

STEPS = """source,model,placement,num_nodes,num_gpus,local_batch,iter_time_s,sync_time_s,plan,origin
sia,bert,44,2,8,12,1.5,0.5,dp,x/placements-aws.csv
sia,bert,,6,24,12,2.5,0.5,dp,x/scalability-aws.csv
sia,bert,8,1,8,12,0.5,0.1,dp,x/placements-dgx.csv
sia,gpt,8,1,8,1,0.5,0.9,pp2,x/placements-aws.csv
pollux,bert,44,2,8,12,9.5,0.5,dp,x/placements-aws.csv
"""
NOISE = "model,batch_size,epoch,progress,grad_sqr,grad_var\nbert,12,1,7387.0,2.0,30.0\n"
JOBS = """trace,job_id,submit_time_s,model,batch_size,num_gpus
one,late,20,bert,384,8
one,early,10.5,bert,96,4
two,other,0,bert,96,4
"""


@pytest.fixture
def write(tmp_path):
    def write_file(text: str):
        path = tmp_path / "file.csv"
        path.write_text(text)
        return path

    return write_file


def test_steps_are_of_one_source_of_named_files_and_of_data_parallelism(write):
    steps = load_placed_steps(write(STEPS), source="sia", gpu_of_origin={"-aws.csv": "T4"})

    assert [(one.placement, one.num_gpus, one.gpu) for one in steps] == [
        ((4, 4), 8, "T4"),
        ((), 24, "T4"),
    ]
    assert steps[0].step_seconds == 1.5
    assert steps[0].sync_seconds == 0.5


def test_an_exchange_longer_than_its_step_is_refused(write):
    with pytest.raises(InvalidSpec, match="line 2"):
        load_placed_steps(
            write(STEPS.replace("1.5,0.5", "0.5,0.6")), source="sia", gpu_of_origin={"aws.csv": "T"}
        )


def test_a_source_without_steps_is_an_error(write):
    with pytest.raises(UnreadableFile, match="no step times of gavel"):
        load_placed_steps(write(STEPS), source="gavel", gpu_of_origin={"-aws.csv": "T4"})


def test_noise_is_read(write):
    (row,) = load_noise(write(NOISE))

    assert (row.model, row.batch, row.epoch) == ("bert", 12, 1)
    assert (row.progress_steps, row.squared_norm, row.variance) == (7387.0, 2.0, 30.0)


def test_what_is_no_number_says_where(write):
    with pytest.raises(InvalidSpec, match=r"line 2.*grad_var"):
        load_noise(write(NOISE.replace("30.0", "many")))


def test_a_missing_column_is_named(write):
    with pytest.raises(UnreadableFile, match="grad_var"):
        load_noise(write(NOISE.replace(",grad_var", ",noise")))


def test_a_workload_is_read_by_name_in_order_of_submission(write):
    path = write(JOBS)
    jobs = load_workload(path, "one", total_samples={"bert": 5.0}, startup_seconds={"bert": 120.0})

    assert [job.id for job in jobs] == ["early", "late"]
    assert [job.submit_seconds for job in jobs] == [10.5, 20.0]
    assert [job.requested_count for job in jobs] == [4, 8]
    assert {(job.total_samples, job.startup_seconds) for job in jobs} == {(5.0, 120.0)}
    assert list_workloads(path) == ("one", "two")


def test_unknown_workloads_and_models_are_errors(write):
    known = {"total_samples": {"bert": 5.0}, "startup_seconds": {"bert": 1.0}}
    with pytest.raises(UnknownName, match="three"):
        load_workload(write(JOBS), "three", **known)
    with pytest.raises(UnknownName, match="bort"):
        load_workload(write(JOBS.replace("late,20,bert", "late,20,bort")), "one", **known)
