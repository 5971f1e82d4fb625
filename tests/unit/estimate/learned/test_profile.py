"""A measured profile: read, refused, fitted, and put in the place of formulas."""

from dataclasses import replace
from pathlib import Path

import pytest

from drystone.describe.catalogue import find_gpu
from drystone.describe.layout import Layout, Layouts
from drystone.describe.machine import default_machine
from drystone.describe.model import Attention, Block, Mlp, ModelSpec
from drystone.describe.profile import TimedAttention
from drystone.describe.recipe import Recipe
from drystone.errors import InvalidSpec, UnreadableFile
from drystone.estimate.learned.profile import (
    Profile,
    TimedCollective,
    TimedMatmul,
    TimedStep,
    fit_link,
    fit_matmuls,
    load_profile,
    save_profile,
)
from drystone.estimate.time.speed import estimate_speed

BLOCK = Block(
    attention=Attention(num_heads=16, num_kv_heads=16, head_dim=128),
    feed_forward=Mlp(ffn_size=8192, gated=False),
)
MODEL = ModelSpec(name="small", hidden_size=2048, stack=((BLOCK, 24),), vocab_size=50304)
RECIPE = Recipe(seq_len=2048, global_batch=64)
MACHINE = default_machine(find_gpu("A100-80G"))
LAYOUTS = Layouts.of([Layout(dp=8, micro_batch=4), Layout(dp=8, tp=2, micro_batch=4)])


def timed_matmuls(flops: float, *, wave_area: float = 5e5, ramp_depth: float = 90.0):
    return tuple(
        TimedMatmul(m=m, n=n, k=k, seconds=2 * (m * n + wave_area) * (k + ramp_depth) / flops)
        for m in (512, 4096, 16384)
        for n, k in ((1024, 1024), (4096, 1024), (8192, 8192))
    )


def estimate(profile: Profile | None):
    return estimate_speed(MODEL, RECIPE, LAYOUTS, MACHINE, profile=profile)


@pytest.mark.parametrize("name", ["p.json", "p.yaml"])
def test_a_written_profile_is_read_back_the_same(tmp_path: Path, name: str):
    profile = Profile(
        device="GPU", matmuls=timed_matmuls(2e14), memory_bandwidth_bytes_per_second=1.5e12,
        launch_seconds=1e-5, collectives=(TimedCollective(ranks=8, num_bytes=2**20, seconds=1e-4),),
        steps=(TimedStep(model="m", launcher="l", measured_seconds=2, estimated_seconds=1),),
    )  # fmt: skip
    save_profile(profile, tmp_path / name)

    assert load_profile(tmp_path / name) == profile
    assert hash(load_profile(tmp_path / name)) == hash(profile)


@pytest.mark.parametrize(
    ("text", "message"),
    [
        ('{"device": "x", "matmul": []}', "matmul"),
        ('{"device": "x", "launch_seconds": -1}', "launch_seconds"),
        ('{"device": "x", "matmuls": [{"m": 0, "n": 1, "k": 1, "seconds": 1}]}', "matmuls.0.m"),
        ('{"device": "x", "memory_bandwidth_bytes_per_second": NaN}', "memory_bandwidth"),
        ("[]", "dictionary"),
        ("{}", "device"),
    ],
)
def test_a_wrong_profile_is_refused_with_the_place(tmp_path: Path, text: str, message: str):
    path = tmp_path / "p.json"
    path.write_text(text)

    with pytest.raises(InvalidSpec, match=message) as caught:
        load_profile(path)
    assert caught.value.where == str(path)


@pytest.mark.parametrize(
    ("name", "content"),
    [("p.json", b'{"device": '), ("p.yaml", b"a: [1, 2"), ("p.json", b"\xff\xfe\x00"),
     ("p.json", b"[" * 100_000)],
)  # fmt: skip
def test_a_broken_file_is_refused(tmp_path: Path, name: str, content: bytes):
    (tmp_path / name).write_bytes(content)

    with pytest.raises(UnreadableFile, match="profile"):
        load_profile(tmp_path / name)


def test_a_missing_file_is_refused(tmp_path: Path):
    with pytest.raises(UnreadableFile):
        load_profile(tmp_path / "nowhere.json")


def test_the_fit_finds_the_rate_behind_the_times():
    fit = fit_matmuls(timed_matmuls(2e14))

    assert fit.flops == pytest.approx(2e14, rel=0.1)


def test_one_wild_reading_does_not_move_the_fit():
    timed = timed_matmuls(2e14)
    wild = (*timed[:-1], timed[-1].model_copy(update={"seconds": timed[-1].seconds * 20}))

    assert fit_matmuls(wild).flops == pytest.approx(fit_matmuls(timed).flops, rel=0.15)


def test_a_link_is_fitted_to_its_largest_and_smallest_transfer():
    timed = (
        TimedCollective(ranks=2, num_bytes=8, seconds=20e-6),
        TimedCollective(ranks=2, num_bytes=2**30, seconds=2**30 / 100e9),
    )
    link = fit_link(timed, name="measured")

    assert link.bandwidth_bytes_per_second == pytest.approx(100e9)
    assert link.latency_seconds == pytest.approx(10e-6, rel=0.01)


def test_half_the_measured_rate_doubles_the_multiplications():
    fast = estimate(Profile(device="x", matmuls=timed_matmuls(2e14)))
    slow = estimate(Profile(device="x", matmuls=timed_matmuls(1e14)))

    assert slow.matmul_seconds / fast.matmul_seconds == pytest.approx(2.0, rel=0.01)


def test_each_measured_part_replaces_only_its_formula():
    base = estimate(None)
    bandwidth = estimate(Profile(device="x", memory_bandwidth_bytes_per_second=1e11))
    network = estimate(
        Profile(device="x", collectives=(TimedCollective(ranks=8, num_bytes=2**30, seconds=1.0),))
    )
    launch = estimate(Profile(device="x", launch_seconds=1e-2))

    assert (bandwidth.memory_bound_seconds > 5 * base.memory_bound_seconds).all()
    assert bandwidth.matmul_seconds == pytest.approx(base.matmul_seconds)
    assert network.tensor_parallel_seconds[1] > 10 * base.tensor_parallel_seconds[1]
    assert network.matmul_seconds == pytest.approx(base.matmul_seconds)
    assert (launch.launch_bound_seconds > 0).all()
    assert launch.matmul_seconds == pytest.approx(base.matmul_seconds)


def test_an_empty_profile_changes_nothing():
    assert estimate(Profile(device="x")).step_seconds == pytest.approx(estimate(None).step_seconds)


def test_a_measured_step_scales_the_estimate_of_that_model_only():
    step = TimedStep(model="small", launcher="drystone", measured_seconds=3, estimated_seconds=2)
    base = estimate(None)
    scaled = estimate(Profile(device="x", steps=(step,)))
    other = estimate(Profile(device="x", steps=(step.model_copy(update={"model": "large"}),)))

    assert scaled.step_seconds == pytest.approx(1.5 * base.step_seconds)
    assert sum(scaled.row(0).items.values()) == pytest.approx(scaled.step_seconds[0])
    assert other.step_seconds == pytest.approx(base.step_seconds)


def test_a_profile_works_for_any_machine():
    profile = Profile(device="x", matmuls=timed_matmuls(1e12), launch_seconds=1e-5)
    machine = replace(MACHINE, gpus_per_node=1)

    assert (estimate_speed(MODEL, RECIPE, LAYOUTS, machine, profile=profile).step_seconds > 0).all()


def test_timed_attention_stands_in_the_place_of_the_formula():
    def timed(factor: float) -> Profile:
        seconds = factor * 2.0 * 4 * 16 * 2048**2 * 128 / 1.5e14
        row = {"sequences": 4, "heads": 16, "tokens": 2048, "head_dim": 128}
        attention = TimedAttention(**row, forward_seconds=seconds, backward_seconds=2.5 * seconds)
        return Profile(device="GPU", attention=(attention,))

    quick, slow = estimate(timed(1.0)), estimate(timed(3.0))

    assert slow.attention_seconds == pytest.approx(3 * quick.attention_seconds)
    assert slow.matmul_seconds == pytest.approx(quick.matmul_seconds)
