"""Which GPU types there are, and which one a name means.

`data/gpus.csv` holds one row a type, each with its source and date. Its `aliases` column lists the
other names of a type, separated by `;`. Names are compared by their words, in any order: case,
punctuation, the vendor's words (NVIDIA, GeForce, Tesla ...) and the spelling of sizes (`80G`,
`80GB`, `80 GiB`) do not matter. A short name such as `A100` or `H100` means the common SXM variant.
"""

from __future__ import annotations

import csv
import re
from functools import cache
from pathlib import Path
from types import MappingProxyType
from typing import Final

from drystone.describe.gpu import GpuSpec
from drystone.errors import UnknownName, close_names
from drystone.units import GB, TERA, GiB

DATA_FOLDER: Final = Path(__file__).parent / "data"

# What a process sees of the nominal memory where nobody has published it: the medians over the
# rows that have `visible_gib` (a test recomputes them). GDDR memory that keeps its error-correcting
# code in line loses a sixteenth to it.
VISIBLE_SHARE: Final = 0.988
VISIBLE_SHARE_INLINE_ECC: Final = 0.925

# One lane, one direction: transfers per second by generation, times the 128/130 line code.
_PCIE_TRANSFERS_PER_SECOND: Final = MappingProxyType({"3.0": 8e9, "4.0": 16e9, "5.0": 32e9})
_PCIE_BYTES_PER_TRANSFER: Final = 128 / 130 / 8
# Grace to Hopper or Blackwell: 900 GB/s, both directions together.
_C2C_BYTES_PER_SECOND: Final = 450e9

_VENDOR_WORDS: Final = frozenset(
    ("nvidia", "amd", "geforce", "tesla", "quadro", "instinct", "radeon", "rtx", "gpu")
)


@cache
def load_gpus() -> tuple[GpuSpec, ...]:
    """Every GPU type of the catalogue, in the order of the file: oldest data-centre parts first."""
    return tuple(_parse_row(row) for row in _read_rows())


def gpu_names() -> tuple[str, ...]:
    """The full names, in the order of the catalogue."""
    return tuple(gpu.name for gpu in load_gpus())


def find_gpu(name: str) -> GpuSpec:
    """The GPU type that `name` means: its full name, an alias, or what a driver calls it."""
    gpu = _gpus_by_key().get(_key(name))
    if gpu is None:
        known = [*gpu_names(), *_aliases()]
        raise UnknownName("GPU", name, known if close_names(name, known) else gpu_names())
    return gpu


def match_gpus(pattern: str) -> tuple[GpuSpec, ...]:
    """The types whose name, vendor or architecture has every word of `pattern` in it.

    An empty pattern matches all; one that matches nothing must at least be a name.
    """
    words = [word for word in re.split(r"[\s*]+", pattern.lower()) if word]
    matches = tuple(
        gpu
        for gpu in load_gpus()
        if all(word in f"{gpu.name} {gpu.vendor} {gpu.architecture}".lower() for word in words)
    )
    return matches or (find_gpu(pattern),)


def pcie_bytes_per_second(bus: str) -> float:
    """One direction of a bus such as `PCIe 4.0 x16`; 0 if it is no PCIe bus."""
    match = re.fullmatch(r"PCIe (\d\.\d) x(\d+)", bus)
    if match is None:
        return 0.0
    transfers = _PCIE_TRANSFERS_PER_SECOND[match.group(1)]
    return transfers * int(match.group(2)) * _PCIE_BYTES_PER_TRANSFER


def _read_rows() -> list[dict[str, str]]:
    with (DATA_FOLDER / "gpus.csv").open(encoding="utf-8", newline="") as file:
        return list(csv.DictReader(file))


def _parse_row(row: dict[str, str]) -> GpuSpec:
    memory_bytes = round(float(row["memory_gib"]) * GiB)
    share = VISIBLE_SHARE_INLINE_ECC if row["inline_ecc"] == "yes" else VISIBLE_SHARE
    visible = row["visible_gib"]
    return GpuSpec(
        name=row["name"],
        vendor=row["vendor"],
        architecture=row["architecture"],
        year=int(row["year"]),
        memory_bytes=memory_bytes,
        usable_bytes=round(float(visible) * GiB if visible else memory_bytes * share),
        memory_bandwidth_bytes_per_second=float(row["memory_bandwidth_gb_s"]) * GB,
        fp32_flops=_number(row["fp32_tflops"]) * TERA,
        tf32_flops=_number(row["tf32_tflops"]) * TERA,
        fp16_flops=_number(row["fp16_tflops"]) * TERA,
        bf16_flops=_number(row["bf16_tflops"]) * TERA,
        fp8_flops=_number(row["fp8_tflops"]) * TERA,
        measured_bf16_flops=_number(row["measured_bf16_tflops"]) * TERA,
        measured_fp8_flops=_number(row["measured_fp8_tflops"]) * TERA,
        link=row["link"],
        link_bytes_per_second=_number(row["link_gb_s"]) * GB,
        bus=row["bus"],
        bus_bytes_per_second=pcie_bytes_per_second(row["bus"]) or _C2C_BYTES_PER_SECOND,
        power_watts=float(row["power_w"]),
        source=row["source"],
        notes=row["notes"],
        date=row["date"],
    )


def _number(text: str) -> float:
    return float(text) if text else 0.0


@cache
def _aliases() -> dict[str, str]:
    """From each alias to the full name."""
    return {
        alias.strip(): row["name"]
        for row in _read_rows()
        for alias in row["aliases"].split(";")
        if alias.strip()
    }


@cache
def _gpus_by_key() -> dict[str, GpuSpec]:
    by_name = {gpu.name: gpu for gpu in load_gpus()}
    by_key = {_key(alias): by_name[name] for alias, name in _aliases().items()}
    return by_key | {_key(name): gpu for name, gpu in by_name.items()}


def _key(name: str) -> str:
    """The words of a name that tell types apart, spelt one way and sorted."""
    text = re.sub(r"(\d) +(gi?b)\b", r"\1\2", name.lower())
    words = (_plain_word(word) for word in re.findall(r"[a-z0-9]+", text))
    return " ".join(sorted(word for word in words if word not in _VENDOR_WORDS))


def _plain_word(word: str) -> str:
    if match := re.fullmatch(r"(\d+)gi?b?", word):
        return f"{match.group(1)}g"
    if re.fullmatch(r"sxm\d", word):
        return "sxm"
    return word.removeprefix("rtx") or word
