"""GPU types of one's own: filled up from a known type, known everywhere, refused with a place."""

from pathlib import Path

import pytest

from drystone.describe.catalogue import find_gpu, load_gpus, match_gpus, own_gpus
from drystone.describe.files.cluster import load_cluster, parse_cluster
from drystone.describe.files.job import make_job
from drystone.describe.files.market import parse_market
from drystone.describe.generations import generation_of
from drystone.describe.gpu_prices import cheapest_price, load_prices
from drystone.describe.machine import default_machine, gpu_link
from drystone.errors import RequestError, UnknownName
from drystone.units import GB, TERA, GiB

NODES = "nodes: [{gpu: Mine, gpus_per_node: 4}]\n"


def described(text):
    return parse_cluster(f"{NODES}gpu_types:\n  Mine: {text}\n").gpu("Mine")


def test_what_is_left_out_is_as_the_like_type_has_it():
    mine, like = described("{like: L40S, memory: 96GiB}"), find_gpu("L40S")

    assert mine.memory_bytes == 96 * GiB
    assert mine.usable_bytes / mine.memory_bytes == pytest.approx(
        like.usable_bytes / like.memory_bytes
    )
    assert mine.bf16_flops == like.bf16_flops
    assert mine.is_own
    assert not like.is_own
    assert generation_of(mine) == generation_of(like)
    assert default_machine(mine).inter == default_machine(like).inter


def test_a_type_can_be_described_from_nothing():
    mine = described(
        "{memory: 64GiB, usable_memory: 60GiB, memory_bandwidth_gb_s: 2000, network: roce 400, "
        "tflops: {fp32: 50, bf16: 400}, link_gb_s: 600, power_w: 500, architecture: Hopper}"
    )

    assert (mine.memory_bytes, mine.usable_bytes) == (64 * GiB, 60 * GiB)
    assert mine.memory_bandwidth_bytes_per_second == 2000 * GB
    assert (mine.fp32_flops, mine.bf16_flops, mine.fp16_flops) == (50 * TERA, 400 * TERA, 0)
    assert "gpu_types.Mine" in mine.source
    # An unknown link reaches a share of its rate, in one direction, and more than the bus.
    assert 0 < gpu_link(mine).bandwidth_bytes_per_second < 300 * GB
    assert "assumption" in gpu_link(mine).source
    assert gpu_link(mine).bandwidth_bytes_per_second > mine.bus_bytes_per_second
    assert default_machine(mine).inter.name == "RoCE 400"


def test_another_peak_forgets_what_was_measured_on_the_like_type():
    assert find_gpu("H100").measured_bf16_flops > 0
    assert described("{like: H100, tflops: {bf16: 500}}").measured_bf16_flops == 0
    mine = described("{like: H100, tflops: {bf16: 500}, measured_tflops: {bf16: 400}}")
    assert mine.measured_bf16_flops == 400 * TERA
    assert described("{like: H100, memory: 96GiB}").measured_bf16_flops > 0


def test_a_link_can_be_taken_away():
    assert gpu_link(described("{like: A100, link: none}")).name == "PCIe 4.0 x16"


def test_names_and_prices_are_known_everywhere_afterwards(tmp_path):
    cluster = parse_cluster(
        "nodes: [{gpu: the mine 2, gpus_per_node: 4}]\ngpu_types:\n"
        "  Mine-2: {like: T4, aliases: [NVIDIA the Mine 2], price_dollars_per_hour: 0.25}\n"
    )

    assert cluster.gpu_types == ("Mine-2",)
    assert cluster.dollars_per_gpu_hour == {"Mine-2": 0.25}
    assert cheapest_price("Mine-2").cloud == "own"
    assert load_gpus()[-1] == own_gpus()[0].gpu == match_gpus("mine-2")[0]
    job = {"model": "gpt2", "train": {"steps": 1}, "gpus": {"allow": ["mine 2"]}}
    assert make_job(job, folder=tmp_path).allowed_gpus == ("Mine-2",)


def test_who_has_not_the_file_leaves_the_name_to_the_service(tmp_path):
    job = {"model": "gpt2", "train": {"steps": 1}, "gpus": {"allow": ["Theirs"]}}

    with pytest.raises(RequestError, match="Theirs"):
        make_job(job, folder=tmp_path)
    assert make_job(job, folder=tmp_path, knows_gpus=False).allowed_gpus == ("Theirs",)


def test_simulations_and_markets_read_the_same_section(tmp_path):
    section = "gpu_types: {Mine: {like: T4, memory: 32GiB}}\n"
    file = tmp_path / "cluster.yaml"
    file.write_text(section + NODES, encoding="utf-8")

    assert load_cluster(file)[0].gpu == "Mine"
    assert find_gpu("mine").memory_bytes == 32 * GiB
    offers = "offers: [{gpu: Mine, price_dollars_per_hour: 1}]"
    assert parse_market(section.replace("32", "64") + offers)[0].gpu == "Mine"
    assert find_gpu("mine").memory_bytes == 64 * GiB  # described anew


@pytest.mark.parametrize(
    ("text", "place", "told"),
    [
        ("{A100: {like: T4}}", "gpu_types.A100", "'A100' means A100-80GB-SXM already"),
        ("{Z: {like: T4, aliases: [NVIDIA L40S]}}", "gpu_types.Z", "means L40S-48GB already"),
        ("{Z: {like: T4}, z: {like: T4}}", "gpu_types.z", "means Z already"),
        ("{NVIDIA: {like: T4}}", "gpu_types.NVIDIA", "valid name"),
        ("{Z 1: {like: T4}}", "gpu_types.Z 1", "valid name"),
        ("{Z: {like: T4, memry: 1GiB}}", "gpu_types.Z.memry", "Did you mean 'memory'"),
        ("{Z: {like: T4, tflops: {bf17: 1}}}", "gpu_types.Z.tflops.bf17", "Did you mean 'bf16'"),
        ("{Z: {like: T4, tflops: {bf16: -1}}}", "gpu_types.Z.tflops.bf16", "greater than 0"),
        ("{Z: {like: A1000}}", "gpu_types.Z.like", "unknown GPU"),
        ("{Z: {like: T4, memory: lots}}", "gpu_types.Z.memory", "not an amount"),
        ("{Z: {like: T4, memory: 1KiB}}", "gpu_types.Z.memory", "1 MiB to 1 PiB"),
        ("{Z: {like: T4, usable_memory: 90GiB}}", "gpu_types.Z", "usable memory exceeds"),
        ("{Z: {like: T4, network: rope}}", "gpu_types.Z.network", "unknown link"),
        ("{Z: {like: T4, link: NVLink 4.0}}", "gpu_types.Z", "`link_gb_s` is missing"),
        ("{Z: {like: T4, bus: PCIe 9}}", "gpu_types.Z.bus", "unknown bus"),
        ("{Z: {memory: 1GiB}}", "gpu_types.Z", "`memory_bandwidth_gb_s` is missing"),
        ("{Z: {memory: 1GiB, memory_bandwidth_gb_s: 9}}", "gpu_types.Z", "`tflops.fp32`"),
        ("{Z: {memory_bandwidth_gb_s: 9, tflops: {fp32: 1}}}", "gpu_types.Z", "`memory`"),
        ("{Z: 1}", "gpu_types.Z", "table of keys"),
        ("[Z]", "gpu_types", "table of types"),
    ],
)
def test_what_is_wrong_is_said_with_its_place_and_what_to_try(text, place, told):
    with pytest.raises(RequestError) as caught:
        parse_cluster(f"gpu_types: {text}\nnodes: [{{gpu: T4}}]", where="c.yaml")

    assert caught.value.where == f"c.yaml: line 1: {place}"
    assert told in str(caught.value)


def test_an_unknown_name_says_where_to_describe_it():
    with pytest.raises(UnknownName, match="gpu_types"):
        find_gpu("quantum accelerator")


def test_the_example_of_the_how_to_page_is_read():
    root = Path(__file__).parents[4]
    page = (root / "docs/howto/own-gpu.md").read_text(encoding="utf-8")
    text = page.split("```yaml\n")[1].split("```")[0]

    assert (root / "examples/own_gpu.yaml").read_text(encoding="utf-8").endswith(text)
    assert set(parse_cluster(text).gpu_types) == {own.gpu.name for own in own_gpus()}


def test_where_one_type_is_wrong_none_of_the_file_is_known():
    described("{like: L40S, memory: 96GiB}")
    told = "{First: {like: T4, price_dollars_per_hour: 1}, Mine: {like: T4}, A100: {like: T4}}"
    with pytest.raises(RequestError, match="means A100-80GB-SXM already"):
        parse_cluster(f"{NODES}gpu_types: {told}\n")

    assert [own.gpu.name for own in own_gpus()] == ["Mine"]
    assert find_gpu("Mine").memory_bytes == 96 * GiB
    assert "First" not in {price.gpu for price in load_prices()}
    with pytest.raises(UnknownName):
        find_gpu("First")


@pytest.mark.parametrize(
    ("read", "wrong"),
    [
        (parse_cluster, "nodes: [{gpu: First, gpus_per_node: 0}]"),
        (parse_cluster, "nodes: [{gpu: First, gpus_per_node: 1}]\nprices: {First: dear}"),
        (parse_market, "offers: [{gpu: First, num_gpus: 1, price_dollars_per_hour: -1}]"),
    ],
)
def test_where_another_part_of_the_file_is_wrong_none_of_its_types_is_known(read, wrong):
    with pytest.raises(RequestError):
        read("gpu_types: {First: {like: T4, price_dollars_per_hour: 1}}\n" + wrong)

    assert own_gpus() == ()
    assert "First" not in {price.gpu for price in load_prices()}
