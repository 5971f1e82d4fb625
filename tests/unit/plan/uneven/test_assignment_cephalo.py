"""Golden rows: Cephalo's published example, and ten more computed from its published profiles."""

import csv
import itertools
import json
from pathlib import Path

import numpy as np
import pytest

from drystone.plan.uneven.assignment import Assignment, plan_assignment
from drystone.plan.uneven.spec import AssignmentSpec, RankKind, even_or_uneven
from drystone.units import GiB

FOLDER = Path(__file__).resolve().parents[3] / "data"
CAPACITY_GIB = {"a6000": 47.99, "l4": 22.5, "p40": 22.5, "p100": 12.0}
USABLE_SHARE = 0.75
BUFFERS_GIB = 2.0
STATE_BYTES_PER_PARAMETER = 16
FURTHER_MICRO_BATCH_SECONDS = 0.010
LARGEST = 64

FOUR = ("l4", "l4", "a6000", "p40")
EIGHT = ("l4", "l4", "a6000", "p40", "p40", "p40", "p100", "p100")
EVEN = (0.25,) * 4

# cluster, model, dtype, label of the memory profile, milliseconds a layer, shares as printed
GOLDEN = [
    (FOUR, "gpt_2.7b", "float16", "paper", 342.297, (0.2253, 0.2582, 0.2582, 0.2582)),
    (FOUR, "gpt_1.3b", "float16", "paper", 388.6, EVEN),
    (FOUR, "gpt_2.7b", "float32", "paper_4gpu", 695.3, (0.191, 0.191, 0.314, 0.304)),
    (FOUR, "bert_xlarge", "float32", "paper_4gpu", 194.8, EVEN),
    (FOUR, "vit_g", "float32", "paper_4gpu", 279.3, EVEN),
    (FOUR, "vit_e", "float32", "paper_4gpu", 446.5, (0.231, 0.231, 0.312, 0.227)),
    (FOUR, "llama_tiny", "float32", "paper_4gpu", 307.5, EVEN),
    (FOUR, "llama_3b", "float32", "paper_4gpu", 816.9, (0.230, 0.230, 0.323, 0.216)),
    (EIGHT, "gpt_2.7b", "float32", "paper", 412.7, (0.147,) * 6 + (0.060,) * 2),
    (EIGHT, "llama_3b", "float32", "paper", 491.1, (0.146,) * 6 + (0.063,) * 2),
    (EIGHT, "vit_e", "float32", "paper", 307.1, (0.137,) * 6 + (0.090,) * 2),
]


def rows_of(name: str) -> list[dict[str, str]]:
    lines = (FOLDER / name).read_text(encoding="utf-8").splitlines()
    return list(csv.DictReader(line for line in lines if not line.startswith("#")))


def layer_seconds(model: str, gpu: str, dtype: str, column: str) -> np.ndarray:
    """What was measured where it was; beyond it, the least-squares line."""
    rows = [
        row
        for row in rows_of("cephalo_layer_latency.csv")
        if (row["model"], row["gpu_type"], row["dtype"]) == (f"deepspeed{model}", gpu, dtype)
    ]
    measured = {int(row["microbatch"]): float(row[column]) for row in rows if row["microbatch"]}
    if measured:
        slope, intercept = np.polyfit(list(measured), list(measured.values()), 1)
    else:
        slope, intercept = json.loads(rows[0][column])
    sizes = range(1, LARGEST + 1)
    return np.array([0.0] + [measured.get(m, slope * m + intercept) for m in sizes]) / 1e3


def compute_memory_bytes(model: str, dtype: str, label: str) -> tuple[np.ndarray, int]:
    """Beyond what was measured, the mean slope of the last five points; and the parameters."""
    rows = [
        row
        for row in rows_of("cephalo_memory.csv")
        if (row["cluster"], row["model"], row["dtype"]) == (label, f"deepspeed{model}", dtype)
    ]
    gib = {int(row["microbatch"]): float(row["compute_memory_GiB"]) for row in rows}
    last, first = max(gib), sorted(gib)[-5:][0]
    growth = (gib[last] - gib[first]) / (last - first)
    curve = [gib.get(m, gib[last] + growth * (m - last)) for m in range(1, LARGEST + 1)]
    return (np.array([0.0, *curve]) + BUFFERS_GIB) * GiB, int(rows[0]["parameters"])


def cephalo_spec(cluster: tuple[str, ...], model: str, dtype: str, label: str) -> AssignmentSpec:
    memory_bytes, num_params = compute_memory_bytes(model, dtype, label)
    kinds = [
        RankKind(
            num_ranks=len(list(ranks)),
            forward_seconds=layer_seconds(model, gpu, dtype, "forward_ms_per_layer"),
            backward_seconds=layer_seconds(model, gpu, dtype, "backward_ms_per_layer"),
            compute_memory_bytes=memory_bytes,
            usable_bytes=USABLE_SHARE * CAPACITY_GIB[gpu] * GiB,
            further_micro_batch_seconds=FURTHER_MICRO_BATCH_SECONDS,
        )
        for gpu, ranks in itertools.groupby(cluster)
    ]
    return AssignmentSpec(
        kinds=tuple(kinds),
        batch=64,
        state_bytes=STATE_BYTES_PER_PARAMETER * num_params,
        regimes=even_or_uneven(len(cluster)),
    )


@pytest.mark.parametrize(
    ("cluster", "model", "dtype", "label", "milliseconds", "shares"),
    GOLDEN,
    ids=[f"{len(row[0])}-{row[1]}-{row[2]}" for row in GOLDEN],
)
def test_time_and_shares_are_those_of_the_table(cluster, model, dtype, label, milliseconds, shares):
    spec = cephalo_spec(cluster, model, dtype, label)
    found = plan_assignment(spec)

    assert isinstance(found, Assignment)
    digits = len(str(milliseconds).split(".")[1])
    assert round(found.layer_seconds * 1e3, digits) == milliseconds
    assert [rank.state_share for rank in found.ranks()] == pytest.approx(shares, abs=5.5e-4)
    assert sum(rank.batch for rank in found.ranks()) == 64
    for rank in found.ranks():
        kind = spec.kinds[rank.kind_index]
        held_bytes = rank.state_share * spec.state_bytes
        assert rank.batch == rank.micro_batch * rank.num_micro_batches
        assert rank.compute_memory_bytes == kind.compute_memory_bytes[rank.micro_batch]
        assert rank.compute_memory_bytes + held_bytes <= kind.usable_bytes + 1


def test_the_published_example_in_full():
    found = plan_assignment(cephalo_spec(FOUR, "gpt_2.7b", "float16", "paper"))

    assert isinstance(found, Assignment)
    ranks = list(found.ranks())
    assert [rank.batch for rank in ranks] == [13, 12, 34, 5]
    assert [rank.micro_batch for rank in ranks] == [13, 6, 34, 5]
    assert [rank.num_micro_batches for rank in ranks] == [1, 2, 1, 1]
    assert [round(rank.state_share, 4) for rank in ranks] == [0.2253, 0.2582, 0.2582, 0.2582]
    assert round(found.state_bytes / GiB, 3) == 41.285
    assert round(found.memory_bytes / GiB, 2) == 73.80
    assert round(found.usable_bytes / GiB, 2) == 86.62
    assert found.regime.name == "uneven"
    assert found.synchronised_layer_seconds >= found.layer_seconds
