"""Facts about GPU generations: complete, or an error that names what to add."""

from dataclasses import fields, replace

import pytest

from drystone.describe.catalogue import find_gpu, load_gpus
from drystone.describe.files.cluster import parse_cluster
from drystone.describe.generations import (
    FILE,
    Generation,
    find_generation,
    generation_of,
    load_generations,
    parse_generations,
)
from drystone.describe.machine import default_machine
from drystone.errors import InvalidSpec, RequestError, UnknownName

LINES = FILE.read_text(encoding="utf-8").splitlines()
COLUMNS = LINES[0].split(",")
H100_NUMBERS = (
    "memory: 80GiB, memory_bandwidth_gb_s: 3350, tflops: {fp32: 67, bf16: 989}, "
    "link: NVLink 4.0, link_gb_s: 900, power_w: 700"
)


def described(text: str):
    return parse_cluster(
        f"nodes: [{{gpu: R100, gpus_per_node: 8}}]\ngpu_types:\n  R100: {{{text}}}\n"
    ).gpu("R100")


def test_every_type_of_the_catalogue_has_a_generation_and_a_wiring():
    for gpu in load_gpus():
        if not gpu.is_own:
            assert generation_of(gpu).name == gpu.architecture
            assert default_machine(gpu).inter.bandwidth_bytes_per_second > 0


def test_every_generation_has_every_fact():
    assert set(COLUMNS) == {one.name for one in fields(Generation)}
    for one in load_generations():
        assert one.source


@pytest.mark.parametrize("column", [one for one in COLUMNS if one not in ("aliases", "name")])
def test_a_row_that_lacks_a_fact_is_an_error_that_names_both(column):
    row = dict.fromkeys(COLUMNS, "1") | {"name": "Rubin", "aliases": ""}
    assert parse_generations([LINES[0], ",".join(row.values())])[0].name == "Rubin"

    for wrong in ("", "soon"):
        if column == "source" and wrong:
            continue
        broken = row | {column: wrong}
        with pytest.raises(InvalidSpec) as caught:
            parse_generations([LINES[0], ",".join(broken.values())])
        assert column in caught.value.message
        assert "generations.csv: Rubin" in caught.value.where


def test_two_generations_cannot_share_a_name():
    with pytest.raises(InvalidSpec, match="hopper"):
        parse_generations([*LINES, LINES[7].replace("Hopper", "HOPPER", 1)])


def test_a_generation_that_nobody_described_is_never_taken_for_another():
    h100 = find_gpu("H100")
    with pytest.raises(UnknownName) as caught:
        generation_of(replace(h100, name="R100", architecture="Rubin"))
    assert "Rubin" in caught.value.message
    assert "GPU type R100" in caught.value.where
    assert "generations.csv" in caught.value.hint

    with pytest.raises(RequestError) as caught:
        described(f"{H100_NUMBERS}, network: InfiniBand NDR, architecture: Rubin")
    assert "R100.architecture" in caught.value.where


@pytest.mark.parametrize(
    ("given", "missing"),
    [("network: InfiniBand NDR", "architecture"), ("architecture: Hopper", "network")],
)
def test_a_type_like_no_other_must_say_what_it_is_and_what_joins_its_nodes(given, missing):
    with pytest.raises(InvalidSpec, match=f"`{missing}` is missing"):
        described(f"{H100_NUMBERS}, {given}")


def test_a_type_that_is_wired_like_no_other_needs_a_network():
    unknown = replace(find_gpu("H100"), name="R100")
    with pytest.raises(InvalidSpec, match="what joins its nodes"):
        default_machine(unknown)
    assert default_machine(unknown, 8, "InfiniBand NDR").inter.name == "InfiniBand NDR"


def test_names_of_generations_are_found_whatever_their_case():
    assert find_generation("ada") is find_generation("Ada  Lovelace")
    gpu = described(f"{H100_NUMBERS}, network: InfiniBand NDR, architecture: hopper")
    assert gpu.architecture == "Hopper"
    assert generation_of(gpu) == generation_of(find_gpu("H100"))
