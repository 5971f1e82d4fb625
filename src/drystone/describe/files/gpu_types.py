"""GPU types of one's own, from the section `gpu_types` of a cluster or a market file.

gpu_types:
  L40S-96GB: {like: L40S, memory: 96GiB, price_dollars_per_hour: 1.2}
  X1-64GB:
    memory: 64GiB
    memory_bandwidth_gb_s: 2000
    tflops: {fp32: 50, bf16: 400}
    architecture: Hopper
    link_gb_s: 600
    network: InfiniBand NDR
  our-A100: {like: A100-80G, profile: a100.json}

With `like`, what is left out is as that type has it. What a file describes is known to everything
that this process does afterwards, under the same rules for names as the catalogue's own types.
"""

from __future__ import annotations

import re
from dataclasses import fields
from pathlib import Path
from types import MappingProxyType
from typing import Annotated, Any, Final

from pydantic import Field

from drystone.describe.catalogue import (
    VISIBLE_SHARE,
    add_own_gpu,
    all_or_none,
    find_gpu,
    pcie_bytes_per_second,
)
from drystone.describe.files.reader import Document, Key, Part, load_yaml, read_part
from drystone.describe.generations import find_generation, load_generations
from drystone.describe.gpu import GpuSpec
from drystone.describe.machine import find_link
from drystone.errors import InvalidSpec, RequestError, UnknownName
from drystone.units import GB, TERA, parse_bytes

SECTION: Final = "gpu_types"
OTHER_LINK: Final = "own link"
_HINT: Final = (
    "Write it like: gpu_types: {L40S-96GB: {like: L40S, memory: 96GiB}}, or with all of "
    "memory, memory_bandwidth_gb_s, tflops: {fp32: 50, bf16: 400}, architecture and network"
)
_NAME: Final = re.compile(r"[A-Za-z][A-Za-z0-9._+-]{0,59}")
_BUSES: Final = tuple(f"PCIe {generation}.0 x16" for generation in (3, 4, 5))
_LEAST_BYTES, _MOST_BYTES = 2**20, 2**50
_WORDS: Final = ("vendor", "year", "bus")
# What holds where neither the file nor `like` says it; 0 and "": not there, or not known.
_NOTHING: Final = MappingProxyType(
    {
        "vendor": "", "year": 0, "tf32_flops": 0.0, "fp16_flops": 0.0,
        "bf16_flops": 0.0, "fp8_flops": 0.0, "measured_bf16_flops": 0.0,
        "measured_fp8_flops": 0.0, "link": "", "link_bytes_per_second": 0.0,
        "bus": "PCIe 4.0 x16", "bus_bytes_per_second": pcie_bytes_per_second("PCIe 4.0 x16"),
        "power_watts": 0.0,
    }
)  # fmt: skip

_Rate = Annotated[float, Field(gt=0, le=1e6)]
_Text = Annotated[str, Field(min_length=1, max_length=200)]


class RatesPart(Part):
    """Teraflop/s, dense, by number format."""

    fp32: _Rate | None = None
    tf32: _Rate | None = None
    fp16: _Rate | None = None
    bf16: _Rate | None = None
    fp8: _Rate | None = None


class MeasuredPart(Part):
    """Teraflop/s of the best matrix multiplication that was measured."""

    bf16: _Rate | None = None
    fp8: _Rate | None = None


class GpuTypePart(Part):
    """One GPU type of one's own."""

    like: _Text | None = None  # a known type: what is left out here is as there
    # other names, such as the driver's
    aliases: Annotated[tuple[_Text, ...], Field(strict=False, max_length=20)] = ()
    memory: _Text | None = None  # nominal, such as 96GiB; needed without `like`
    usable_memory: _Text | None = None  # what a process sees; left out: the usual share
    memory_bandwidth_gb_s: _Rate | None = None  # needed without `like`
    # dense peaks by number format: fp32, tf32, fp16, bf16, fp8; fp32 is needed without `like`
    tflops: RatesPart = Field(default_factory=RatesPart)
    # the best matrix multiplication that somebody measured: bf16, fp8
    measured_tflops: MeasuredPart = Field(default_factory=MeasuredPart)
    link: _Text | None = None  # between GPUs of a node, e.g. NVLink 4.0; none: the bus alone
    link_gb_s: _Rate | None = None  # of that link, both directions together
    bus: _Text | None = None  # PCIe 3.0, 4.0 or 5.0 x16; the second
    # between nodes, one card a GPU, e.g. InfiniBand NDR; needed without `like`
    network: _Text | None = None
    profile: _Text | None = None  # what `drystone profile` wrote, beside this file
    power_w: _Rate | None = None
    vendor: _Text | None = None
    # the generation it behaves like, e.g. Hopper; needed without `like`
    architecture: _Text | None = None
    year: Annotated[int, Field(ge=1990, le=2100)] | None = None
    price_dollars_per_hour: Annotated[float, Field(gt=0, le=1e6)] | None = None  # of one GPU
    source: _Text | None = None  # where the numbers are from; left out: this file
    date: _Text | None = None  # of the numbers
    notes: _Text | None = None


def load_gpu_types(path: Path) -> tuple[GpuSpec, ...]:
    """Know the GPU types that a file describes; none where it has no such section."""
    return adopt_gpu_types(load_yaml(path))


@all_or_none()
def adopt_gpu_types(document: Document) -> tuple[GpuSpec, ...]:
    """Know the GPU types of a document from now on, and their prices; none if one is wrong."""
    table = document.value.get(SECTION) if isinstance(document.value, dict) else None
    if table is None:
        return ()
    if not isinstance(table, dict):
        raise InvalidSpec(
            "must be a table of types by name", where=document.place((SECTION,)), hint=_HINT
        )
    return tuple(_adopt(document, name) for name in table)


def _adopt(document: Document, name: str) -> GpuSpec:
    key = (SECTION, name)
    part = read_part(document, GpuTypePart, key, hint=_HINT)
    try:
        gpu = _gpu_of(document, name, part, key)
        add_own_gpu(gpu, part.aliases, part.price_dollars_per_hour)
    except RequestError as error:
        error.where = error.where or document.place(key)
        raise
    return gpu


def _gpu_of(document: Document, name: str, part: GpuTypePart, key: Key) -> GpuSpec:
    """The type, filled up from the one it is like."""
    if not _NAME.fullmatch(name):
        raise InvalidSpec(
            f"{name[:60]!r} is not a valid name for a type",
            hint="Use up to 60 letters, digits and . _ + -, beginning with a letter",
        )
    like = _named(document, part.like, (*key, "like"))
    values: dict[str, Any] = dict(_NOTHING)
    if like is not None:
        values = {field.name: getattr(like, field.name) for field in fields(like)}
    values |= _rates(part) | _link(part, values) | _profile(document, part)
    values |= {word: told for word in _WORDS if (told := getattr(part, word)) is not None}
    for needed, what in (
        ("memory_bandwidth_bytes_per_second", "memory_bandwidth_gb_s"),
        ("fp32_flops", "tflops.fp32"),
    ):
        if needed not in values:
            raise InvalidSpec(f"`{what}` is missing", hint=_HINT)
    memory_bytes, usable_bytes = _memory(document, part, like, key)
    if part.architecture is not None:
        place = (*key, "architecture")
        values["architecture"] = _named_generation(document, part.architecture, place)
    if part.network is not None:
        values["network"] = _network(document, part.network, (*key, "network"))
    if like is None:  # neither is guessed: they change times by factors
        _check_kin(part)
    if part.bus is not None:
        if part.bus not in _BUSES:
            raise UnknownName("bus", part.bus, _BUSES, where=document.place((*key, "bus")))
        values["bus_bytes_per_second"] = pcie_bytes_per_second(part.bus)
    values |= {
        "name": name, "memory_bytes": memory_bytes, "usable_bytes": usable_bytes, "is_own": True,
        "like": (like.like or like.name) if like else "",
        "source": part.source or document.place(key), "date": part.date or "",
        "notes": part.notes or "",
    }  # fmt: skip
    return GpuSpec(**values)


def _check_kin(part: GpuTypePart) -> None:
    """A type that is like no other must say what generation it is of, and what joins its nodes."""
    if part.architecture is None:
        known = ", ".join(generation.name for generation in load_generations())
        raise InvalidSpec(
            "`architecture` is missing", hint=f"Name the generation it behaves like: {known}"
        )
    if part.network is None:
        raise InvalidSpec(
            "`network` is missing",
            hint="Name what joins its nodes, e.g. InfiniBand NDR or Ethernet 100",
        )


def _named_generation(document: Document, name: str, key: Key) -> str:
    try:
        return find_generation(name).name
    except UnknownName as error:
        error.where = document.place(key)
        raise


def _rates(part: GpuTypePart) -> dict[str, float]:
    """What is given of rates, in base units."""
    given = {f"{precision}_flops": rate for precision, rate in part.tflops if rate is not None}
    for precision, rate in part.measured_tflops:
        if rate is not None:
            given[f"measured_{precision}_flops"] = rate
        elif (
            f"{precision}_flops" in given
        ):  # another peak: what was measured elsewhere says nothing here
            given[f"measured_{precision}_flops"] = 0.0
    rates = {precision: rate * TERA for precision, rate in given.items()}
    if part.memory_bandwidth_gb_s is not None:
        rates["memory_bandwidth_bytes_per_second"] = part.memory_bandwidth_gb_s * GB
    if part.power_w is not None:
        rates["power_watts"] = part.power_w
    return rates


def _profile(document: Document, part: GpuTypePart) -> dict[str, str]:
    """The path of what was measured; a relative one is beside the file that names it."""
    if part.profile is None:
        return {}
    return {"profile": str(Path(document.where).parent / part.profile)}


def _named(document: Document, name: str | None, key: Key) -> GpuSpec | None:
    if name is None:
        return None
    try:
        return find_gpu(name)
    except UnknownName as error:
        error.where = document.place(key)
        raise


def _memory(
    document: Document, part: GpuTypePart, like: GpuSpec | None, key: Key
) -> tuple[int, int]:
    """Nominal and usable bytes."""
    nominal = _bytes(document, part.memory, (*key, "memory"))
    usable = _bytes(document, part.usable_memory, (*key, "usable_memory"))
    if nominal is None:
        if like is None:
            raise InvalidSpec("`memory` is missing", hint=_HINT)
        nominal = like.memory_bytes
    share = like.usable_bytes / like.memory_bytes if like else VISIBLE_SHARE
    return nominal, round(nominal * share) if usable is None else usable


def _bytes(document: Document, text: str | None, key: Key) -> int | None:
    if text is None:
        return None
    try:
        size = parse_bytes(text)
    except RequestError as error:
        error.where = document.place(key)
        raise
    if not _LEAST_BYTES <= size <= _MOST_BYTES:
        raise InvalidSpec("memory is 1 MiB to 1 PiB", where=document.place(key))
    return size


def _link(part: GpuTypePart, values: dict[str, Any]) -> dict[str, Any]:
    """The link's name and rate where given; a rate without a name is a link of its own."""
    if part.link == "none":
        return {"link": "", "link_bytes_per_second": 0.0}
    if part.link is None and part.link_gb_s is None:
        return {}
    if part.link_gb_s is None:
        raise InvalidSpec("`link_gb_s` is missing", hint="A link has a rate, both directions")
    name = part.link or values["link"] or OTHER_LINK
    return {"link": name, "link_bytes_per_second": part.link_gb_s * GB}


def _network(document: Document, name: str, key: Key) -> str:
    try:
        return find_link(name).name
    except UnknownName as error:
        error.where = document.place(key)
        raise
