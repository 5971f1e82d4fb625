"""What if all that is known of a job is how long it took? Options under a stated assumption.

A trace of durations says: n GPUs, d seconds. What the job would do on other GPUs, it does not say,
so that is assumed, in the open: `Scaling.statement` goes into every report.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Final

import numpy as np

from drystone.describe.catalogue import find_gpu
from drystone.describe.cluster import NodeSpec
from drystone.describe.job import JobSpec
from drystone.errors import InvalidSpec
from drystone.schedule.snapshot import FloatArray, IntArray, OptionSet

_KINDS: Final = ("rigid", "linear", "amdahl")


@dataclass(frozen=True, slots=True, kw_only=True)
class Scaling:
    """How a job's speed is taken to change with the number and the type of its GPUs."""

    kind: str = "rigid"
    serial_share: float = 0.0  # of the work on one GPU, that no further GPU makes shorter
    by_peak: bool = False  # types differ as their 16-bit peaks do; else all are alike

    @classmethod
    def parse(cls, text: str, *, by_peak: bool = False) -> Scaling:
        """`rigid`, `linear`, or `amdahl:0.05`."""
        kind, _, share = text.strip().lower().partition(":")
        hint = "Write rigid, linear, or amdahl:0.05 (the serial share)"
        if kind not in _KINDS or (kind == "amdahl") != bool(share):
            raise InvalidSpec(f"scaling {text!r} is not known", hint=hint)
        try:
            serial = float(share or 0.0)
        except ValueError:
            raise InvalidSpec(f"scaling {text!r}: the share is no number", hint=hint) from None
        if not 0 <= serial < 1:
            raise InvalidSpec(f"scaling {text!r}: the share must be 0 to 1", hint=hint)
        return cls(kind=kind, serial_share=serial, by_peak=by_peak)

    @property
    def is_elastic(self) -> bool:
        """Whether a job may get another number of GPUs than it had."""
        return self.kind != "rigid"

    def speedups(self, num_gpus: IntArray) -> FloatArray:
        """Over one GPU (Amdahl's law; linear where nothing is serial)."""
        result: FloatArray = num_gpus / (1 + self.serial_share * (num_gpus - 1))
        return result

    def statement(self) -> str:
        """For the report."""
        number = {
            "rigid": "run on just the number of GPUs they had",
            "linear": "are taken to speed up in proportion to their GPUs",
            "amdahl": f"are taken to speed up by Amdahl's law, {self.serial_share:.0%} serial",
        }[self.kind]
        types = (
            "are as fast as their 16-bit peaks say" if self.by_peak else "are taken as equally fast"
        )
        return f"Jobs without a model {number}; GPU types {types}."


def duration_options(
    nodes: Sequence[NodeSpec], scaling: Scaling | None = None
) -> Callable[[JobSpec], OptionSet]:
    """A function from a job that counts GPU seconds to its options on these nodes."""
    scaling = scaling or Scaling()
    gpu_types = tuple(dict.fromkeys(node.gpu for node in nodes))
    total = [sum(one.num_gpus for one in nodes if one.gpu == gpu) for gpu in gpu_types]
    rates = _rates(gpu_types) if scaling.by_peak else np.ones(len(gpu_types))
    cache: dict[tuple[object, ...], OptionSet] = {}

    def options_of(job: JobSpec) -> OptionSet:
        asked = job.requested_count or job.min_gpus
        home = gpu_types.index(job.requested_gpu) if job.requested_gpu in gpu_types else 0
        key = (
            asked,
            job.min_gpus,
            job.max_gpus,
            job.allowed_gpus,
            job.denied_gpus,
            home if scaling.by_peak else 0,
        )
        if key not in cache:
            rows = [
                (kind, count)
                for kind, gpu in enumerate(gpu_types)
                for count in _counts(asked, min(job.max_gpus, total[kind]))
                if count <= total[kind] and job.allows(gpu, count)
            ]
            kinds = np.array([kind for kind, _ in rows], dtype=np.int64)
            numbers = np.array([number for _, number in rows], dtype=np.int64)
            counts = np.zeros((len(rows), len(gpu_types)), dtype=np.int64)
            counts[np.arange(len(rows)), kinds] = numbers
            speeds = asked * scaling.speedups(numbers) / scaling.speedups(np.array(asked))
            cache[key] = OptionSet(
                counts=counts,
                samples_per_second=speeds * rates[kinds] / rates[home],
                memory_bytes=np.zeros(len(rows)),
            )
        return cache[key]

    return options_of


def _counts(asked: int, most: int) -> list[int]:
    """What was asked for, and powers of two up to `most`."""
    powers = [1 << power for power in range(max(most, 1).bit_length())]
    return sorted({asked, *powers})


def _rates(gpu_types: Sequence[str]) -> FloatArray:
    gpus = [find_gpu(name) for name in gpu_types]
    return np.array([max(gpu.bf16_flops, gpu.fp16_flops, gpu.fp32_flops) for gpu in gpus])
