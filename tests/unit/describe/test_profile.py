"""Profiles of GPU types: adopted, slowed, read from cluster files, and what then follows them."""

from pathlib import Path

import numpy as np
import pytest

from drystone.describe.catalogue import find_gpu
from drystone.describe.files.cluster import load_cluster_file
from drystone.describe.machine import default_machine
from drystone.describe.model_source import find_model
from drystone.describe.pool import parse_pool
from drystone.describe.profile import (
    Profile,
    TimedCollective,
    TimedLayer,
    TimedPace,
    adopt_profile_files,
    adopt_profiles,
    forget_profiles,
    save_profile,
)
from drystone.describe.recipe import Precision, Recipe
from drystone.errors import UnknownName
from drystone.estimate.layer import layer_seconds
from drystone.plan.options import enumerate_options
from drystone.plan.search import plan_job

MODEL = find_model("gpt2")
RECIPE = Recipe(seq_len=1024, global_batch=32, precision=Precision.FP32)


@pytest.fixture(autouse=True)
def _forget():
    yield
    forget_profiles()


def timed(device: str, seconds: float, sizes=(1, 2, 4, 8, 16, 32)) -> Profile:
    layers = [
        TimedLayer(model=MODEL.name, seq_len=1024, micro_batch=size,
                   forward_seconds=size * seconds, backward_seconds=2 * size * seconds)
        for size in sizes
    ]  # fmt: skip
    return Profile(device=device, precision="fp32", layers=tuple(layers))


def test_a_layer_takes_what_was_measured_and_between_sizes_what_lies_between():
    adopt_profiles([timed("NVIDIA T4", 0.01, sizes=(1, 4))])
    found = layer_seconds(
        MODEL, RECIPE, default_machine(find_gpu("T4")), micro_batch=np.array([1, 2, 4])
    )

    assert found.forward[[0, 2]] == pytest.approx([0.01, 0.04])
    assert 0.01 < found.forward[1] < 0.04
    assert found.backward[0] == pytest.approx(0.02, rel=0.1)  # and adding up gradients


def test_a_profile_says_nothing_of_other_models_lengths_and_precisions():
    plain = layer_seconds(MODEL, RECIPE, default_machine(find_gpu("T4"))).forward
    for other in (
        timed("T4", 1.0).model_copy(update={"precision": "bf16-mixed"}),
        Profile(
            device="T4",
            paces=(
                TimedPace(
                    model="another",
                    launcher="drystone",
                    micro_batch=1,
                    measured_seconds=9,
                    estimated_seconds=1,
                ),
            ),
        ),
    ):
        adopt_profiles([other])
        assert layer_seconds(MODEL, RECIPE, default_machine(find_gpu("T4"))).forward == plain


def test_the_pace_of_ranks_corrects_their_model():
    machine = default_machine(find_gpu("T4"))
    plain = layer_seconds(MODEL, RECIPE, machine).forward
    pace = TimedPace(model=MODEL.name, launcher=RECIPE.launcher, micro_batch=2,
                     measured_seconds=3.0, estimated_seconds=2.0)  # fmt: skip
    adopt_profiles([Profile(device="T4", paces=(pace,))])

    assert layer_seconds(MODEL, RECIPE, default_machine(find_gpu("T4"))).forward == 1.5 * plain


def test_plans_and_options_follow_the_profile():
    def shares() -> dict[str, int]:
        ranks = plan_job(MODEL, RECIPE, parse_pool("1xA100-80G,1xT4")).plans
        uneven = next(plan for plan in ranks if len(plan.gpus) == 2 and len(plan.stages) == 1)
        return {share.gpu: share.batch for share in uneven.stages[0].ranks}

    def speeds() -> list[float]:
        found = enumerate_options(MODEL, RECIPE, parse_pool("1xA100-80G,1xT4"), prunes=False)
        rows = zip(found.table.counts.tolist(), found.table.samples_per_second, strict=True)
        return [float(speed) for counts, speed in rows if counts in ([1, 0], [0, 1])]

    before = shares()
    assert before["A100-80GB-SXM"] > 2 * before["T4-16GB"]
    adopt_profiles([timed("T4", 0.01), timed("A100-80G", 0.01)])
    assert abs(shares()["T4-16GB"] - 16) <= 1  # but for the head
    a100, t4 = speeds()
    assert t4 == pytest.approx(a100, rel=0.1)


def test_links_are_those_that_were_measured_also_between_two_types():
    def link(rate: float, other: str = "") -> TimedCollective:
        return TimedCollective(
            level="inter", other=other, ranks=2, num_bytes=2**30, seconds=2**30 / rate
        )

    adopt_profiles([Profile(device="T4", collectives=(link(5e9), link(2e9, "A100-80GB-SXM")))])
    pool = parse_pool("1xA100-80G,1xT4")

    assert pool.groups[1].machine.inter.bandwidth_bytes_per_second == pytest.approx(5e9)
    assert pool.between.bandwidth_bytes_per_second == pytest.approx(2e9)


def test_a_cluster_file_names_profiles_and_paces_that_no_estimate_sees(tmp_path: Path):
    save_profile(timed("T4", 0.01), tmp_path / "t4.json")
    save_profile(timed("A100-80G", 0.02), tmp_path / "true.json")
    (tmp_path / "c.yaml").write_text(
        "nodes:\n"
        "  - {gpu: A100, emulate: {speed: 0.01, pace: true.json}}\n"
        "  - {gpu: T4, emulate: {speed: 0.01}}\n"
        "profiles: [t4.json]\n"
    )
    cluster = load_cluster_file(tmp_path / "c.yaml")
    t4, a100 = cluster.group("T4-16GB", 1).machine, cluster.group("A100-80GB-SXM", 1).machine

    assert layer_seconds(MODEL, RECIPE, t4).forward == pytest.approx(1.0)  # a hundredth as fast
    assert a100.profile is None
    paced = cluster.true_machine("A100-80GB-SXM")
    assert layer_seconds(MODEL, RECIPE, paced).forward == pytest.approx(2.0)


def test_a_profile_of_an_unknown_device_is_refused_with_its_file(tmp_path: Path):
    save_profile(Profile(device="Abacus 3"), tmp_path / "p.json")

    with pytest.raises(UnknownName) as caught:
        adopt_profile_files([tmp_path / "p.json"])
    assert "p.json" in str(caught.value.where)
