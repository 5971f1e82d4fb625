import itertools

import numpy as np
import pytest

from drystone.describe.cluster import make_nodes
from drystone.errors import RequestError
from drystone.observe.generate import (
    TraceSpec,
    generate_trace,
    parse_mix,
    parse_sizes,
)

NODES = [
    *make_nodes("A100-80G", count=2, gpus_per_node=8),
    *make_nodes("T4", count=4, gpus_per_node=4),
]


def spec(**fields: object) -> TraceSpec:
    usual = {
        "num_jobs": 2000,
        "span_hours": 240.0,
        "kinds": parse_mix("gpt2:3,gpt2-xl@lora:1"),
        "sizes": parse_sizes("lognormal:4h,1.0"),
    }
    return TraceSpec(**(usual | fields))


def test_the_same_seed_gives_the_same_jobs():
    assert generate_trace(spec(seed=5)) == generate_trace(spec(seed=5))
    assert generate_trace(spec(seed=5)) != generate_trace(spec(seed=6))


@pytest.mark.parametrize("arrivals", ["poisson", "diurnal", "bursty"])
def test_jobs_arrive_in_about_the_time_that_was_asked_for(arrivals: str):
    times = [job.submit_seconds for job in generate_trace(spec(arrivals=arrivals))]

    assert times == sorted(times)
    assert times[0] == 0
    assert times[-1] / 3600 == pytest.approx(240, rel=0.3)


def test_more_jobs_come_by_day_than_by_night():
    spans = [job.submit_seconds for job in generate_trace(spec(arrivals="diurnal", num_jobs=5000))]
    by_hour = np.bincount((np.array(spans) % 86400 // 3600).astype(int), minlength=24)

    assert by_hour.max() > 3 * max(by_hour.min(), 1)


def test_bursts_come_from_one_owner_with_one_model():
    jobs = generate_trace(spec(arrivals="bursty"))
    gaps = np.diff([job.submit_seconds for job in jobs])
    same = [(a.owner, a.model) == (b.owner, b.model) for a, b in itertools.pairwise(jobs)]

    # Poisson gaps of 432 s on average would hardly ever be below a minute for most pairs.
    assert np.median(gaps) < 100
    assert np.mean(same) > 0.8


def test_shares_and_sizes_are_those_asked_for():
    jobs = generate_trace(spec())
    small = [job for job in jobs if job.model == "gpt2"]
    per_hour = np.array([job.total_samples for job in small])

    assert len(small) / len(jobs) == pytest.approx(0.75, abs=0.04)
    # gpt2 has 124.4 M parameters: 4 h on an A100 at 48 % of 312 TFLOP/s, 1024 tokens a sample.
    median = 4 * 3600 * 312e12 * 0.48 / (6 * 124.4e6 * 1024)
    assert np.median(per_hour) == pytest.approx(median, rel=0.1)
    assert np.std(np.log(per_hour)) == pytest.approx(1.0, rel=0.1)
    assert all(job.total_samples % job.global_batch == 0 for job in jobs)


def test_tokens_are_taken_as_they_are():
    jobs = generate_trace(spec(sizes=parse_sizes("10M,40M"), num_jobs=50))

    tokens = {round(job.total_samples * job.seq_len / 1e6) for job in jobs}
    assert tokens == {10, 40}


def test_the_share_of_deadlines_is_kept_and_they_can_be_met():
    jobs = generate_trace(spec(deadline_share=0.3))
    due = [job for job in jobs if np.isfinite(job.deadline_seconds)]

    assert len(due) / len(jobs) == pytest.approx(0.3, abs=0.04)
    assert all(job.deadline_seconds > job.submit_seconds for job in due)


def test_owners_ask_for_gpus_that_do():
    jobs = generate_trace(spec(num_jobs=60, kinds=parse_mix("gpt2,llama-3.1-8b@lora")), NODES)

    assert all(job.requested_gpu in ("A100-80G", "T4") for job in jobs)
    assert all(job.requested_count & (job.requested_count - 1) == 0 for job in jobs)
    assert {job.requested_gpu for job in jobs} == {"A100-80G", "T4"}
    heavy = [job for job in jobs if job.requested_gpu == "T4" and job.model != "gpt2"]
    assert all(job.requested_count >= 2 for job in heavy)


@pytest.mark.parametrize("text", ["", "gpt2@half", "gpt2:x", "gpt2:0", "gpt-99"])
def test_a_wrong_mix_is_refused(text: str):
    with pytest.raises(RequestError):
        parse_mix(text)


@pytest.mark.parametrize("text", ["", "lognormal:4h", "4h,50M", "lognormal:4h,0", "-1h", "xh"])
def test_wrong_sizes_are_refused(text: str):
    with pytest.raises(RequestError):
        parse_sizes(text)
