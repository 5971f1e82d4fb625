import numpy as np
import pytest

from drystone.describe.cluster import make_nodes
from drystone.describe.job import JobSpec
from drystone.errors import RequestError
from drystone.schedule.options import Scaling, duration_options, estimated_options

NODES = [
    *make_nodes("A100-80G", count=2, gpus_per_node=8),
    *make_nodes("T4", count=4, gpus_per_node=4),
]


def lasting(**fields: object) -> JobSpec:
    usual = {"min_gpus": 1, "max_gpus": 16, "requested_count": 4, "requested_gpu": "T4"}
    return JobSpec(id="a", submit_seconds=0, model="", total_samples=400.0, **(usual | fields))


def test_a_job_takes_as_long_as_it_did_on_what_it_had():
    for text in ("rigid", "linear", "amdahl:0.1"):
        options = duration_options(NODES, Scaling.parse(text, by_peak=True))(lasting())
        row = int(np.flatnonzero((options.counts == [0, 4]).all(axis=1))[0])

        assert 400.0 / options.samples_per_second[row] == pytest.approx(100.0)


def test_a_rigid_job_has_one_number_of_gpus():
    options = duration_options(NODES)(lasting(min_gpus=4, max_gpus=4))

    assert options.counts.tolist() == [[4, 0], [0, 4]]
    assert options.samples_per_second.tolist() == [4.0, 4.0]


def test_amdahls_law_bounds_the_speedup():
    options = duration_options(NODES, Scaling.parse("amdahl:0.25"))(lasting())
    alone, sixteen = (
        float(options.samples_per_second[(options.counts == [0, n]).all(axis=1)][0])
        for n in (1, 16)
    )

    assert sixteen / alone == pytest.approx(16 / (1 + 0.25 * 15))


def test_types_may_differ_by_their_peaks():
    equal = duration_options(NODES, Scaling.parse("linear"))(lasting())
    by_peak = duration_options(NODES, Scaling.parse("linear", by_peak=True))(lasting())

    # 312 against 65 TFLOP/s of 16-bit products.
    ratio = by_peak.samples_per_second / equal.samples_per_second
    assert ratio[equal.counts[:, 0] > 0] == pytest.approx(312 / 65, rel=0.01)
    assert ratio[equal.counts[:, 1] > 0] == pytest.approx(1.0)


@pytest.mark.parametrize("text", ["", "amdahl", "amdahl:x", "amdahl:2", "linear:1", "cubic"])
def test_unknown_scalings_are_refused(text: str):
    with pytest.raises(RequestError):
        Scaling.parse(text)


def test_a_model_known_by_name_gets_estimated_options():
    job = JobSpec(
        id="a", submit_seconds=0, model="gpt2", total_samples=1e6, global_batch=64, max_gpus=8
    )
    options_of = estimated_options(NODES)

    options = options_of(job)

    assert options_of(job) is options
    assert options.counts.sum(axis=1).max() <= 8
    assert (options.samples_per_second > 0).all()
    fastest = {
        gpu: options.samples_per_second[options.counts[:, 1 - kind] == 0].max()
        for kind, gpu in enumerate(("A100-80G", "T4"))
    }
    assert fastest["A100-80G"] > 2 * fastest["T4"]
    mixed = (options.counts > 0).all(axis=1)
    assert mixed.any()


def test_a_model_that_nobody_knows_is_refused_with_its_job():
    job = JobSpec(id="odd", submit_seconds=0, model="gpt-99", total_samples=1)

    with pytest.raises(RequestError, match="odd"):
        estimated_options(NODES)(job)
