"""The scenarios of Sia, Pollux and BOA, on data made up in their layout."""

import sys
from pathlib import Path

import numpy as np
import pytest

from drystone.observe.simulation import simulate_policy

sys.path.insert(0, str(Path(__file__).resolve().parents[3] / "benchmarks"))

from goodput.scenarios import (
    BOA_MOST_GPUS,
    SIA_SLOWDOWN,
    SIA_STARTUP_SECONDS,
    pollux_scenario,
    rented_scenario,
    sia_scenario,
)

MODELS = ("cifar10", "bert", "deepspeech2")
SIZES = {"-aws.csv": 4, "-dgx-ext.csv": 8, "-rtx.csv": 8}


@pytest.fixture
def data(tmp_path: Path) -> Path:
    (tmp_path / "peers").mkdir()
    (tmp_path / "traces").mkdir()
    lines = [
        "source,model,placement,num_nodes,num_gpus,local_batch,iter_time_s,sync_time_s,plan,origin"
    ]
    for model in MODELS:
        for end, size in SIZES.items():
            for count in (*range(1, size + 1), 2 * size):
                nodes = -(-count // size)
                placement = f"{size}{size}" if nodes == 2 else str(count)
                for batch in (5, 40):
                    row = f"{model},{placement},{nodes},{count},{batch},{0.1 + batch / 100},0.05,dp"
                    lines.append(f"sia,{row},t/{model}/placements{end}")
                    if size == 4:
                        lines.append(f"pollux,{row},t/{model}/placements.csv")
    (tmp_path / "peers" / "throughput.csv").write_text("\n".join(lines) + "\n")
    noise = ["model,batch_size,epoch,progress,grad_sqr,grad_var"]
    for model in MODELS:
        for batch in (20, 640):
            noise += [f"{model},{batch},{epoch},{50 * epoch},1.0,{8 * epoch}" for epoch in (1, 2)]
    (tmp_path / "peers" / "sia_statistical_efficiency.csv").write_text("\n".join(noise) + "\n")
    head = "trace,job_id,submit_time_s,model,batch_size,num_gpus"
    jobs = [f"w,{model}-{at},{30 * at},{model},160,4" for at, model in enumerate(MODELS)]
    for name in ("trace_sia.csv", "trace_pollux.csv"):
        (tmp_path / "traces" / name).write_text("\n".join([head, *jobs]) + "\n")
    return tmp_path


def test_sias_cluster_and_what_its_jobs_cost(data: Path):
    scenario = sia_scenario(data, "w")
    job = scenario.jobs[0]
    options = scenario.options_of(job)

    assert sum(node.num_gpus for node in scenario.nodes) == 64
    assert job.startup_seconds == SIA_STARTUP_SECONDS["cifar10"]
    assert job.total_samples == 100 * 20  # steps of the least batch
    assert options.phase_ends_samples == (1000.0,)  # and the second epoch ends with the job
    assert {tuple(row) for row in options.counts} >= {(1, 0, 0), (8, 0, 0), (0, 16, 0)}


def test_speeds_grow_with_the_noise_and_are_slowed_down_as_measured(data: Path):
    scenario = sia_scenario(data, "w")
    options = scenario.options_of(scenario.jobs[0])
    one_t4 = int(np.flatnonzero((options.counts == (1, 0, 0)).all(axis=1))[0])

    assert options.num_phases == 2
    assert (options.speeds(1) >= options.speeds(0)).all()
    # The least batch of 20 on one GPU: a step of 0.3 s, and no batch is worth more than 9 of them.
    least = 20 / 0.3 / SIA_SLOWDOWN["cifar10"]
    assert 0.999 * least <= options.speeds(0)[one_t4] <= 9 * least


def test_rigid_jobs_have_their_count_on_any_type_and_count_their_own_steps(data: Path):
    scenario = sia_scenario(data, "w", rigid=True)
    job = scenario.jobs[0]
    options = scenario.options_of(job)

    assert options.counts.tolist() == [[4, 0, 0], [0, 4, 0], [0, 0, 4]]
    # A step of 160 on 4 GPUs takes 0.5 s; the mean over epochs of steps a second is just that.
    ends = (*options.phase_ends_samples, job.total_samples)
    seconds = sum(
        (end - begin) / options.speeds(phase)[0]
        for phase, (begin, end) in enumerate(zip((0.0, *ends), ends, strict=False))
    )
    assert job.total_samples / seconds == pytest.approx(2.0 / SIA_SLOWDOWN["cifar10"])


@pytest.mark.parametrize("name", ["fifo", "shortest", "prices"])
def test_policies_run_on_sias_scenario(data: Path, name: str):
    assert simulate_policy(sia_scenario(data, "w"), name)[0].num_done == 3


def test_wrong_speeds_and_unknown_lengths_reach_the_scenario(data: Path):
    scenario = sia_scenario(data, "w", speed_error_share=0.2, seed=3, knows_lengths=False)

    assert scenario.faults.speed_error_share == 0.2
    assert scenario.faults.seed == 3
    assert not scenario.knows_lengths
    assert simulate_policy(scenario, "prices")[0].num_done == 3


def test_polluxs_cluster_is_of_t4_and_starts_cost_the_same(data: Path):
    scenario = pollux_scenario(data, "w")

    assert {(node.gpu, node.num_gpus) for node in scenario.nodes} == {("T4", 4)}
    assert {job.startup_seconds for job in scenario.jobs} == {30.0}


def test_boas_setting_has_no_nodes_but_an_offer(data: Path):
    scenario = rented_scenario(data, "w", models=("bert",), budget_dollars_per_hour=12.0)

    assert scenario.nodes == ()
    assert [offer.gpu for offer in scenario.offers] == ["T4"]
    assert [job.model for job in scenario.jobs] == ["bert"]
    assert scenario.jobs[0].max_gpus == BOA_MOST_GPUS
    assert simulate_policy(scenario, "pollux-autoscale")[0].num_done == 1
