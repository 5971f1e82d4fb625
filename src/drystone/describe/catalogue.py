"""Which GPU types there are, and which one a name means.

`data/gpus.csv` holds one row a type, each with its source and date. Its `aliases` column lists the
other names of a type, separated by `;`. Names are compared by their words, in any order: case,
punctuation, the vendor's words (NVIDIA, GeForce, Tesla ...) and the spelling of sizes (`80G`,
`80GB`, `80 GiB`) do not matter. A short name such as `A100` or `H100` means the common SXM variant.

A file of the user's may describe more types (`files/gpu_types.py`): from then on this process knows
them like any other, and no name of the catalogue changes its meaning.
"""

from __future__ import annotations

import csv
import re
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from functools import cache
from pathlib import Path
from types import MappingProxyType
from typing import Final, NamedTuple

from drystone.describe.generations import find_generation
from drystone.describe.gpu import GpuSpec
from drystone.errors import InvalidSpec, UnknownName, close_names
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


class OwnGpu(NamedTuple):
    """A type of the user's own: its other names, and what it costs where that was said."""

    gpu: GpuSpec
    aliases: tuple[str, ...]
    dollars_per_hour: float | None


# By name; `add_own_gpu` alone adds to it.
_OWN: Final[dict[str, OwnGpu]] = {}


def load_gpus() -> tuple[GpuSpec, ...]:
    """Every GPU type, in the order of the file, oldest data-centre parts first; then one's own."""
    return (*_shipped_gpus(), *(own.gpu for own in own_gpus()))


def own_gpus() -> tuple[OwnGpu, ...]:
    """The types that files of the user's have described, in their order."""
    return tuple(_OWN.values())


def _check_own_names(name: str, aliases: Sequence[str] = ()) -> None:
    """Refuse a name that means another type already: nobody's A100 becomes something else."""
    for one in (name, *aliases):
        if not _key(one):
            raise InvalidSpec(
                f"{one!r} is not a valid name for a type", hint="Say more than the vendor"
            )
        taken = _gpus_by_key().get(_key(one))
        if taken is not None and not (taken.is_own and taken.name == name):
            raise InvalidSpec(
                f"{one!r} means {taken.name} already",
                hint=f"Choose another name; `like: {taken.name}` takes over what it has",
            )


@contextmanager
def all_or_none() -> Iterator[None]:
    """Where something is wrong, no type that was added inside is known; also a decorator."""
    before = dict(_OWN)
    try:
        yield
    except BaseException:
        _OWN.clear()
        _OWN.update(before)
        _gpus_by_key.cache_clear()
        raise


def add_own_gpu(
    gpu: GpuSpec, aliases: Sequence[str] = (), dollars_per_hour: float | None = None
) -> None:
    """Know this type from now on; an own type of the same name is described anew."""
    _check_own_names(gpu.name, aliases)
    _OWN[gpu.name] = OwnGpu(gpu, tuple(aliases), dollars_per_hour)
    _gpus_by_key.cache_clear()


def gpu_names() -> tuple[str, ...]:
    """The full names, in the order of the catalogue."""
    return tuple(gpu.name for gpu in load_gpus())


def find_gpu(name: str) -> GpuSpec:
    """The GPU type that `name` means: its full name, an alias, or what a driver calls it."""
    gpu = _gpus_by_key().get(_key(name))
    if gpu is None:
        known = [*gpu_names(), *_aliases()]
        error = UnknownName("GPU", name, known if close_names(name, known) else gpu_names())
        error.hint += " Or describe a type of your own: `gpu_types` in a cluster file"
        raise error
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


@cache
def _shipped_gpus() -> tuple[GpuSpec, ...]:
    return tuple(_parse_row(row) for row in _read_rows())


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
        architecture=find_generation(row["architecture"]).name,
        year=int(row["year"]),
        memory_bytes=memory_bytes,
        usable_bytes=round(float(visible) * GiB if visible else memory_bytes * share),
        memory_bandwidth_bytes_per_second=float(row["memory_bandwidth_gb_s"]) * GB,
        fp32_flops=_number(row["fp32_tflops"]) * TERA,
        tf32_flops=_number(row["tf32_tflops"]) * TERA,
        fp16_flops=_number(row["fp16_tflops"]) * TERA,
        bf16_flops=_number(row["bf16_tflops"]) * TERA,
        fp8_flops=_number(row["fp8_tflops"]) * TERA,
        fp4_flops=_number(row["fp4_tflops"]) * TERA,
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
    by_key |= {_key(alias): own.gpu for own in _OWN.values() for alias in own.aliases}
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
