"""What do tokens cost on rented GPUs?"""

from __future__ import annotations

from typing import overload

import numpy as np
import numpy.typing as npt

from drystone.errors import InvalidSpec
from drystone.units import HOUR_SECONDS

FloatArray = npt.NDArray[np.float64]

BILLION_TOKENS = 1e9


@overload
def dollars_per_billion_tokens(
    tokens_per_second_per_gpu: float, *, gpu_dollars_per_hour: float
) -> float: ...


@overload
def dollars_per_billion_tokens(
    tokens_per_second_per_gpu: FloatArray, *, gpu_dollars_per_hour: float | FloatArray
) -> FloatArray: ...


def dollars_per_billion_tokens(
    tokens_per_second_per_gpu: float | FloatArray, *, gpu_dollars_per_hour: float | FloatArray
) -> float | FloatArray:
    """Price of a billion tokens: the GPU count cancels, as pace and price are both per GPU."""
    if np.any(np.asarray(gpu_dollars_per_hour) < 0):
        raise InvalidSpec(f"a price of {gpu_dollars_per_hour} dollars an hour is below 0")
    dollars_per_second = gpu_dollars_per_hour / HOUR_SECONDS
    return dollars_per_second * BILLION_TOKENS / tokens_per_second_per_gpu


def step_dollars(step_seconds: float, *, num_gpus: int, gpu_dollars_per_hour: float) -> float:
    """Price of one training step on `num_gpus` GPUs."""
    return step_seconds * num_gpus * gpu_dollars_per_hour / HOUR_SECONDS
