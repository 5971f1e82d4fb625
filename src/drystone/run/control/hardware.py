"""Signs of broken hardware in the logs of ranks: ECC errors, lost GPUs, links, disks.

Each row names what the message means. `certain` ones say that a machine is broken, whatever ran on
it: the node is drained. The others can also come from a faulty kernel of the job, so the job is
tried again and nothing is drained. NVIDIA's list of Xid numbers tells the machine's from the
program's (docs.nvidia.com/deploy/xid-errors): 13, 31, 43 and 45 are a program's.
"""

from __future__ import annotations

import re
from dataclasses import dataclass
from typing import Final


@dataclass(frozen=True, slots=True)
class HardwareSign:
    """What a message in a log says about the machine."""

    meaning: str
    pattern: re.Pattern[str]
    is_certain: bool


def _sign(meaning: str, pattern: str, *, is_certain: bool) -> HardwareSign:
    return HardwareSign(meaning, re.compile(pattern, re.IGNORECASE), is_certain)


_SIGNS: Final = (
    _sign(
        "uncorrectable memory error of the GPU",
        r"uncorrectable ECC error|ECC_?UNCORRECTABLE|double.bit ECC",
        is_certain=True,
    ),
    _sign("uncorrectable NVLink error", r"uncorrectable NVLink error", is_certain=True),
    _sign(
        "the GPU is not reachable any more",
        r"fallen off the bus|GPU is lost|Unable to determine the device handle for GPU",
        is_certain=True,
    ),
    _sign(
        "the driver reports a hardware fault (Xid)",
        r"\bXid\b[^\n]{0,60}?: (?:48|63|64|74|79|92|94|95|119|120|140)\b",
        is_certain=True,
    ),
    _sign(
        "the driver or the fabric manager of the node does not work",
        r"system not yet initialized|CUDA_ERROR_SYSTEM_NOT_READY|Driver/library version mismatch",
        is_certain=True,
    ),
    _sign("the GPU's hardware stack failed", r"hardware stack error", is_certain=True),
    _sign(
        "no GPU can be used",
        r"No CUDA GPUs are available|no CUDA-capable device|"
        r"unsupported display driver / cuda driver combination|"
        r"CUDA driver initialization failed|No HIP GPUs are available",
        is_certain=False,
    ),
    _sign("the GPU is busy or unavailable", r"busy or unavailable", is_certain=False),
    _sign(
        "a kernel failed on the GPU",
        r"illegal memory access|unspecified launch failure|illegal instruction was encountered|"
        r"misaligned address|CUDA(?: error:)? unknown error|Memory access fault by GPU|"
        r"ncclUnhandledCudaError|unhandled cuda error|"
        r"CU(?:BLAS|DNN)_STATUS_(?:EXECUTION_FAILED|INTERNAL_ERROR|NOT_INITIALIZED|MAPPING_ERROR)",
        is_certain=False,
    ),
)


def find_hardware_sign(log: str) -> HardwareSign | None:
    """The gravest sign of broken hardware in a log; None where there is none."""
    return next((sign for sign in _SIGNS if sign.pattern.search(log)), None)
