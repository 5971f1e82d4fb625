"""The catalogue of GPUs: complete, plausible, and found by the names that people use."""

import contextlib
import csv
import re
import statistics
from collections import defaultdict
from itertools import pairwise

import pytest
from hypothesis import given
from hypothesis import strategies as st

from drystone.describe import catalogue
from drystone.describe.catalogue import find_gpu, gpu_names, load_gpus, match_gpus
from drystone.describe.gpu import GpuSpec
from drystone.errors import UnknownName
from drystone.units import GB, TERA, GiB


def _rows() -> list[dict[str, str]]:
    with (catalogue.DATA_FOLDER / "gpus.csv").open(encoding="utf-8", newline="") as file:
        return list(csv.DictReader(file))


def test_there_are_at_least_forty_types_with_distinct_names():
    names = gpu_names()

    assert len(names) >= 40
    assert len(set(names)) == len(names)


@pytest.mark.parametrize("gpu", load_gpus(), ids=lambda gpu: gpu.name)
def test_every_row_is_plausible_and_has_source_and_date(gpu: GpuSpec):
    assert gpu.source
    assert re.fullmatch(r"20\d\d-\d\d-\d\d", gpu.date)
    assert 2010 <= gpu.year <= 2030
    assert 0.85 * gpu.memory_bytes < gpu.usable_bytes <= gpu.memory_bytes
    assert 4 * GiB <= gpu.memory_bytes <= 512 * GiB
    assert 100 * GB < gpu.memory_bandwidth_bytes_per_second < 20_000 * GB
    assert 50 <= gpu.power_watts <= 2000
    assert gpu.bus
    assert gpu.bus_bytes_per_second > 10 * GB
    assert bool(gpu.link) == bool(gpu.link_bytes_per_second)


@pytest.mark.parametrize("gpu", load_gpus(), ids=lambda gpu: gpu.name)
def test_narrower_formats_are_never_slower_and_nothing_beats_its_peak(gpu: GpuSpec):
    rates = [gpu.fp32_flops, gpu.tf32_flops, gpu.bf16_flops, gpu.fp8_flops]
    present = [rate for rate in rates if rate]

    # Vendors round: an L40 does 90.5 in tf32 and 90.52 in fp32.
    assert all(wide < 1.001 * narrow for wide, narrow in pairwise(present))
    assert gpu.measured_bf16_flops < (gpu.bf16_flops or 1)
    assert gpu.measured_fp8_flops < (gpu.fp8_flops or 1)
    if gpu.year >= 2020:
        assert gpu.bf16_flops == gpu.fp16_flops > 0


def test_well_known_numbers_are_right():
    a100 = find_gpu("A100-80GB-SXM")

    assert a100.bf16_flops == 312 * TERA
    assert a100.link_bytes_per_second == 600 * GB
    assert a100.memory_bandwidth_bytes_per_second == 2040 * GB
    assert a100.usable_bytes == round(79.15 * GiB)
    assert a100.bus_bytes_per_second == pytest.approx(31.5e9, rel=1e-3)
    assert find_gpu("T4").bf16_flops == 0
    assert find_gpu("H100").fp8_flops == 1979 * TERA


@pytest.mark.parametrize(
    ("name", "meant"),
    [
        ("A100-80G", "A100-80GB-SXM"),
        ("A100-80GB", "A100-80GB-SXM"),
        ("a100 80gb sxm", "A100-80GB-SXM"),
        ("A100 80 GiB", "A100-80GB-SXM"),
        ("A100", "A100-80GB-SXM"),
        ("A100-40G", "A100-40GB-SXM"),
        ("NVIDIA A100-SXM4-40GB", "A100-40GB-SXM"),
        ("NVIDIA A100 80GB PCIe", "A100-80GB-PCIe"),
        ("V100-32G", "V100-32GB-SXM"),
        ("Tesla V100-SXM2-16GB", "V100-16GB-SXM"),
        ("H100", "H100-80GB-SXM"),
        ("NVIDIA H100 80GB HBM3", "H100-80GB-SXM"),
        ("NVIDIA H100 PCIe", "H100-80GB-PCIe"),
        ("T4", "T4-16GB"),
        ("4090", "RTX-4090"),
        ("NVIDIA GeForce RTX 4090", "RTX-4090"),
        ("RTX4090", "RTX-4090"),
        ("2080 Ti", "RTX-2080-Ti"),
        ("RTX A6000", "RTX-A6000"),
        ("NVIDIA RTX 6000 Ada Generation", "RTX-6000-Ada"),
        ("Quadro RTX 8000", "RTX-8000"),
        ("AMD Instinct MI300X", "MI300X-192GB"),
        ("NVIDIA GH200 480GB", "GH200-96GB"),
        ("K80 (per die)", "K80-12GB"),
        ("H100-96GB-HBM2e-500W (Meta Grand Teton)", "H100-96GB-HBM2e"),
    ],
)
def test_names_that_people_and_drivers_use_are_understood(name: str, meant: str):
    assert find_gpu(name).name == meant


def test_no_name_means_two_types():
    meanings = defaultdict(set)
    for name in gpu_names():
        meanings[catalogue._key(name)].add(name)
    for alias, name in catalogue._aliases().items():
        meanings[catalogue._key(alias)].add(name)

    assert all(len(names) == 1 for names in meanings.values())


def test_an_unknown_name_offers_close_ones():
    with pytest.raises(UnknownName, match="Did you mean 'A100-80G'"):
        find_gpu("A100-90G")
    with pytest.raises(UnknownName, match="Known: A10"):
        find_gpu("zzz")


@given(st.text(max_size=40))
def test_any_text_is_either_a_gpu_or_a_clear_error(name: str):
    with contextlib.suppress(UnknownName):
        assert find_gpu(name) in load_gpus()


def test_patterns_match_names_vendors_and_architectures():
    assert {gpu.vendor for gpu in match_gpus("amd")} == {"AMD"}
    assert [gpu.name for gpu in match_gpus("hopper nvl")] == ["H100-94GB-NVL"]
    assert match_gpus("") == load_gpus()
    assert [gpu.name for gpu in match_gpus("A100-80G-SXM4")] == ["A100-80GB-SXM"]


@pytest.mark.parametrize(
    ("inline_ecc", "share"),
    [("no", catalogue.VISIBLE_SHARE), ("yes", catalogue.VISIBLE_SHARE_INLINE_ECC)],
)
def test_the_share_of_visible_memory_is_the_median_of_the_published(inline_ecc: str, share: float):
    published = [
        float(row["visible_gib"]) / float(row["memory_gib"])
        for row in _rows()
        if row["visible_gib"]
        and row["inline_ecc"] == inline_ecc
        and "visible memory" not in row["notes"]
    ]

    assert len(published) >= 5
    assert statistics.median(published) == pytest.approx(share, abs=1e-3)


def test_bus_rates_follow_generation_and_width():
    assert catalogue.pcie_bytes_per_second("PCIe 3.0 x16") == pytest.approx(15.754e9, rel=1e-4)
    assert catalogue.pcie_bytes_per_second("PCIe 5.0 x8") == pytest.approx(31.508e9, rel=1e-4)
    assert catalogue.pcie_bytes_per_second("NVLink-C2C") == 0
