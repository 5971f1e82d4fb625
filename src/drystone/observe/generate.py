"""Synthetic traces: jobs that arrive, and are as large, as a description says.

Arrivals: `poisson`; `diurnal`, whose rate swings over the day by `DAY_SWING` around its mean with
the peak at 15:00; `bursty`, sweeps of jobs of one kind and one owner, `BURST_JOBS` on average, a
minute apart. Sizes are tokens, or GPU hours on the reference: an A100-80G at the share of its peak
that published runs have in the median.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Sequence
from dataclasses import dataclass, replace
from typing import Final

import numpy as np

from drystone.describe.catalogue import find_gpu
from drystone.describe.cluster import NodeSpec
from drystone.describe.job import JobSpec
from drystone.describe.model import ModelSpec
from drystone.describe.model_source import find_model
from drystone.describe.option import OptionSet
from drystone.describe.recipe import Tuning
from drystone.errors import InvalidSpec
from drystone.estimate.parameters import count_model
from drystone.schedule.options import estimated_options
from drystone.units import HOUR_SECONDS

ARRIVALS: Final = ("poisson", "diurnal", "bursty")
DAY_SWING: Final = 0.8
PEAK_HOUR: Final = 15.0
BURST_JOBS: Final = 8.0
BURST_GAP_SECONDS: Final = 60.0
REFERENCE_GPU: Final = "A100-80G"
# docs/measurements.md: the median over published dense 16-bit runs on A100-80G.
REFERENCE_MFU: Final = 0.48
# Deadlines: the job's time on eight reference GPUs, times a number between these.
DEADLINE_GPUS: Final = 8
DEADLINE_SLACK: Final = (1.5, 5.0)
_STEP_TOKENS: Final = 2**18
_MAX_SEQ_LEN: Final = 4096
DEFAULT_MIX: Final = (
    "gpt2-xl:3,bert-large-uncased:3,llama-3.2-1b:3,qwen2.5-1.5b:2,llama-3.2-3b:2,"
    "llama-3.1-8b@lora:3,llama-3.1-8b:2,mistral-7b-v0.3@qlora:1,qwen2.5-14b@lora:1"
)


@dataclass(frozen=True, slots=True, kw_only=True)
class JobKind:
    """A model, how it is trained, and its share of the jobs."""

    model: ModelSpec
    name: str
    tuning: str = "full"
    share: float = 1.0

    @property
    def seq_len(self) -> int:
        """The tokens of a sequence."""
        if self.model.vision is not None:
            return self.model.vision.num_tokens
        return min(self.model.context_length or _MAX_SEQ_LEN, _MAX_SEQ_LEN)

    @property
    def global_batch(self) -> int:
        """As many sequences as a quarter of a million tokens have."""
        return max(8, _STEP_TOKENS // self.seq_len)


@dataclass(frozen=True, slots=True, kw_only=True)
class Sizes:
    """How much work jobs are: drawn from a list, or lognormal around a median."""

    values: tuple[float, ...]  # the list, or the median alone
    sigma: float = 0.0  # of the logarithm; 0: a list
    in_gpu_hours: bool = True  # else tokens

    def draw(self, number: int, rng: np.random.Generator) -> list[float]:
        """So many sizes."""
        if self.sigma:
            drawn: list[float] = (
                self.values[0] * np.exp(self.sigma * rng.standard_normal(number))
            ).tolist()
            return drawn
        return [self.values[index] for index in rng.integers(len(self.values), size=number)]


@dataclass(frozen=True, slots=True, kw_only=True)
class TraceSpec:
    """What the jobs should be like."""

    num_jobs: int
    span_hours: float  # in which they arrive, on average
    kinds: tuple[JobKind, ...]
    sizes: Sizes
    arrivals: str = "poisson"
    num_owners: int = 4
    deadline_share: float = 0.0
    seed: int = 0

    def __post_init__(self) -> None:
        if self.num_jobs < 1 or self.num_owners < 1 or not self.span_hours > 0:
            raise InvalidSpec("there must be at least one job, one owner and some time")
        if self.arrivals not in ARRIVALS:
            raise InvalidSpec(
                f"arrivals {self.arrivals!r} are not known", hint=f"Write {', '.join(ARRIVALS)}"
            )
        if not 0 <= self.deadline_share <= 1:
            raise InvalidSpec("the share of jobs with a deadline must be 0 to 1")


def parse_mix(text: str) -> tuple[JobKind, ...]:
    """`llama-3.1-8b@lora:3,gpt2-xl` : models, how they are trained, and their shares."""
    kinds = []
    for part in filter(None, (part.strip() for part in text.split(","))):
        name, _, share = part.partition(":")
        name, _, tuning = name.partition("@")
        try:
            kind = JobKind(
                model=find_model(name),
                name=name.strip(),
                tuning=Tuning(tuning or "full").value,
                share=float(share or 1),
            )
        except ValueError:
            raise InvalidSpec(
                f"mix: {part!r} cannot be read", hint="Write them like llama-3.1-8b@lora:3,gpt2-xl"
            ) from None
        if not (math.isfinite(kind.share) and kind.share > 0):
            raise InvalidSpec(f"mix: the share of {name} must be above 0")
        kinds.append(kind)
    if not kinds:
        raise InvalidSpec("mix: no model is named", hint="Write them like llama-3.1-8b:3,gpt2-xl")
    return tuple(kinds)


def parse_sizes(text: str) -> Sizes:
    """`lognormal:4h,1.5` (median, sigma of the logarithm), or a list: `1h,8h` or `50M,1B`."""
    words = text.strip().lower()
    is_lognormal = words.startswith("lognormal:")
    parts = [part.strip() for part in words.removeprefix("lognormal:").split(",") if part.strip()]
    hint = "Write lognormal:4h,1.5 or 1h,8h in GPU hours; lognormal:50M,1 or 50M,1B in tokens"
    if not parts or (is_lognormal and len(parts) != 2):
        raise InvalidSpec(f"sizes {text!r} cannot be read", hint=hint)
    sigma = _amount(parts.pop(), hint)[0] if is_lognormal else 0.0
    amounts = [_amount(part, hint) for part in parts]
    units = {is_hours for _, is_hours in amounts}
    if len(units) != 1 or any(value <= 0 for value, _ in amounts) or (is_lognormal and sigma <= 0):
        raise InvalidSpec(f"sizes {text!r}: all in one unit, and above 0", hint=hint)
    return Sizes(values=tuple(value for value, _ in amounts), sigma=sigma, in_gpu_hours=units.pop())


def generate_trace(spec: TraceSpec, nodes: Sequence[NodeSpec] = ()) -> tuple[JobSpec, ...]:
    """The jobs; with `nodes`, each asks for GPUs of that cluster as an owner would."""
    streams = np.random.SeedSequence(spec.seed).spawn(4)
    times, bursts = _arrivals(spec, np.random.default_rng(streams[0]))
    rng = np.random.default_rng(streams[1])
    shares = np.array([kind.share for kind in spec.kinds])
    num_bursts = bursts[-1] + 1
    kinds = rng.choice(len(spec.kinds), size=num_bursts, p=shares / shares.sum())
    # A few owners submit most: the n-th has the share 1 / n.
    owner_shares = 1.0 / np.arange(1, spec.num_owners + 1)
    owners = rng.choice(spec.num_owners, size=num_bursts, p=owner_shares / owner_shares.sum())
    sizes = spec.sizes.draw(spec.num_jobs, np.random.default_rng(streams[2]))
    luck = np.random.default_rng(streams[3])
    digits = len(str(spec.num_jobs))
    jobs = []
    for number, (when, burst, size) in enumerate(zip(times, bursts, sizes, strict=True)):
        kind = spec.kinds[int(kinds[burst])]
        samples, gpu_seconds = _work(kind, size, in_gpu_hours=spec.sizes.in_gpu_hours)
        slack, has_deadline = luck.uniform(*DEADLINE_SLACK), luck.random() < spec.deadline_share
        deadline = when + slack * gpu_seconds / DEADLINE_GPUS if has_deadline else math.inf
        jobs.append(
            JobSpec(
                id=f"job-{number:0{digits}d}",
                submit_seconds=round(when, 1),
                model=kind.name,
                total_samples=samples,
                global_batch=kind.global_batch,
                seq_len=kind.seq_len,
                tuning=kind.tuning,
                owner=f"team-{int(owners[burst]) + 1}",
                deadline_seconds=round(deadline, 1) if has_deadline else math.inf,
            )
        )
    return tuple(_ask(jobs, nodes, luck) if nodes else jobs)


def _amount(text: str, hint: str) -> tuple[float, bool]:
    scales = {"k": 1e3, "m": 1e6, "b": 1e9, "t": 1e12, "h": 1.0}
    scale = scales.get(text[-1:], 0.0)
    try:
        return float(text[:-1] if scale else text) * (scale or 1.0), text[-1:] == "h"
    except ValueError:
        raise InvalidSpec(f"size {text!r} cannot be read", hint=hint) from None


def _arrivals(spec: TraceSpec, rng: np.random.Generator) -> tuple[list[float], list[int]]:
    """When each job comes, and to which burst it belongs; without bursts each is its own."""
    gap = spec.span_hours * HOUR_SECONDS / spec.num_jobs
    if spec.arrivals == "bursty":
        return _bursts(spec.num_jobs, gap, rng)
    times = np.cumsum(rng.exponential(gap, spec.num_jobs))
    times -= times[0]
    if spec.arrivals == "diurnal":
        times = _swing(times)
    return times.tolist(), list(range(spec.num_jobs))


def _swing(times: np.ndarray) -> np.ndarray:
    """Even time as time of day: where the rate is high, much of the one passes in little of it."""
    day = 24 * HOUR_SECONDS
    end = float(times[-1]) * 2 + 2 * day
    clock = np.linspace(0.0, end, int(end / 300) + 2)
    # The integral of 1 + DAY_SWING cos(2 pi (t - peak) / day).
    phase = 2 * np.pi * (clock - PEAK_HOUR * HOUR_SECONDS) / day
    passed = clock + DAY_SWING * day / (2 * np.pi) * np.sin(phase)
    swung = np.interp(times, passed - passed[0], clock)
    return np.asarray(swung - swung[0])


def _bursts(num_jobs: int, gap: float, rng: np.random.Generator) -> tuple[list[float], list[int]]:
    found: list[tuple[float, int]] = []
    begin, burst = 0.0, 0
    while len(found) < num_jobs:
        size = int(rng.geometric(1 / BURST_JOBS))
        offsets = np.cumsum(rng.exponential(BURST_GAP_SECONDS, size))
        found += [(begin + float(offset), burst) for offset in offsets - offsets[0]]
        begin += float(rng.exponential(gap * BURST_JOBS))
        burst += 1
    found = sorted(found[:num_jobs])
    return [when for when, _ in found], [mine for _, mine in found]


def _work(kind: JobKind, size: float, *, in_gpu_hours: bool) -> tuple[float, float]:
    """Whole steps' worth of samples, and GPU seconds on the reference: 6 operations a parameter."""
    rate = find_gpu(REFERENCE_GPU).bf16_flops * REFERENCE_MFU
    flops_per_sample = 6.0 * count_model(kind.model).active * kind.seq_len
    samples = size * HOUR_SECONDS * rate / flops_per_sample if in_gpu_hours else size / kind.seq_len
    samples = max(1, round(samples / kind.global_batch)) * kind.global_batch
    return float(samples), samples * flops_per_sample / rate


def _ask(jobs: list[JobSpec], nodes: Sequence[NodeSpec], rng: np.random.Generator) -> list[JobSpec]:
    """Each owner names a type, and the fewest GPUs that do, once, twice or four times."""
    options_of = estimated_options(nodes)
    types = tuple(dict.fromkeys(node.gpu for node in nodes))
    totals = np.array([sum(n.num_gpus for n in nodes if n.gpu == gpu) for gpu in types], float)
    return [_ask_one(job, options_of, types, totals, rng) for job in jobs]


def _ask_one(
    job: JobSpec,
    options_of: Callable[[JobSpec], OptionSet],
    types: tuple[str, ...],
    totals: np.ndarray,
    rng: np.random.Generator,
) -> JobSpec:
    pick, doublings = rng.random(), int(rng.integers(3))
    counts: np.ndarray = options_of(job).counts
    alone = (counts > 0).sum(axis=1) == 1
    fits = np.array([bool((alone & (counts[:, kind] > 0)).any()) for kind in range(len(types))])
    if not fits.any():
        return job
    weights = np.cumsum(np.where(fits, totals, 0.0))
    kind = int(np.searchsorted(weights, pick * weights[-1], side="right"))
    mine = np.unique(counts[alone & (counts[:, kind] > 0), kind])
    powers = mine[(mine & (mine - 1)) == 0]
    sizes = powers if len(powers) else mine
    count = int(sizes[min(doublings, len(sizes) - 1)])
    return replace(job, requested_gpu=types[kind], requested_count=count)
