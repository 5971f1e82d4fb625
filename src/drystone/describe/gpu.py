"""What a GPU can do, as its vendor and independent measurements say.

The rows live in `data/gpus.csv` and are read by `catalogue.py`; files of people add to them
(`files/gpu_types.py`).
"""

from __future__ import annotations

from dataclasses import dataclass

from drystone.errors import InvalidSpec


@dataclass(frozen=True, slots=True, kw_only=True)
class GpuSpec:
    """One GPU type. Rates are dense (no sparsity), per second; 0 means the format is not there."""

    name: str
    vendor: str
    architecture: str
    year: int
    memory_bytes: int  # nominal
    usable_bytes: int  # what a process can see (nominal minus reserved by driver and ECC)
    memory_bandwidth_bytes_per_second: float
    fp32_flops: float
    tf32_flops: float
    fp16_flops: float
    bf16_flops: float
    fp8_flops: float
    measured_bf16_flops: float  # best matrix multiplication measured by others; 0: none published
    measured_fp8_flops: float  # as above
    link: str  # the name of the GPU-to-GPU link, e.g. "NVLink 3.0"; "" when there is only the bus
    link_bytes_per_second: float  # of that link, both directions together; 0: only the bus
    bus: str  # e.g. "PCIe 4.0 x16"
    bus_bytes_per_second: float  # one direction
    power_watts: float
    source: str
    notes: str = ""
    fp4_flops: float = 0.0  # with scales for blocks of numbers (MXFP8 and NVFP4 need them)
    date: str = ""  # when the row was last checked, year-month-day
    is_own: bool = False  # described by a file of the user's, not by the catalogue
    like: str = ""  # of an own type: the catalogue's type that it is wired like, and filled up from
    network: str = ""  # of an own type: one such card a GPU joins its nodes; "": as usual
    profile: str = ""  # path of what `drystone profile` measured of it; "": the formulas alone

    def __post_init__(self) -> None:
        if self.memory_bytes <= 0 or self.usable_bytes <= 0:
            raise InvalidSpec(f"GPU {self.name}: memory must be > 0")
        if self.usable_bytes > self.memory_bytes:
            raise InvalidSpec(f"GPU {self.name}: usable memory exceeds the nominal memory")
        if self.memory_bandwidth_bytes_per_second <= 0 or self.fp32_flops <= 0:
            raise InvalidSpec(f"GPU {self.name}: bandwidth and fp32 rate must be > 0")
