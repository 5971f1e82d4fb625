"""Unequal devices on a machine without any: as slow, and with as little memory, as they are told.

Every section of work really runs, then the rank sleeps until the time at which a device of its
speed would have ended: the end of the section before, or the beginning of this one if that is
later, plus the cost of the section. Collectives go on meanwhile, as they do beside a GPU. Ratios
repeat as long as the real work is a small part of the cost (an eighth, say); `overruns` counts
where it was not. Memory is counted by `memory_ledger.py`, and going beyond it is torch's own error.

The environment variable DRYSTONE_EMULATE says which device a rank is, as JSON (docs/runtime.md).
"""

from __future__ import annotations

import json
import statistics
import time
import weakref
from collections import defaultdict
from collections.abc import Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import dataclass, field
from typing import Any, Final

import torch
from torch._guards import detect_fake_mode
from torch.utils._python_dispatch import TorchDispatchMode
from torch.utils._pytree import tree_leaves

from drystone.describe.catalogue import find_gpu
from drystone.describe.files.json_shapes import from_plain
from drystone.errors import InvalidSpec
from drystone.plan.plan import Plan


class EmulatedOutOfMemory(torch.OutOfMemoryError):
    """What CUDA would raise, with the numbers."""

    def __init__(self, *, asked_bytes: int, live_bytes: int, cap_bytes: int) -> None:
        self.asked_bytes, self.live_bytes, self.cap_bytes = asked_bytes, live_bytes, cap_bytes
        super().__init__(
            f"emulated device out of memory: tried to allocate {asked_bytes} bytes, "
            f"{live_bytes} of {cap_bytes} are in use"
        )


class Ledger(TorchDispatchMode):
    """Counts the storages that operations inside `with ledger:` make."""

    def __init__(self, cap_bytes: int = 0) -> None:
        super().__init__()
        if cap_bytes < 0:
            raise InvalidSpec(f"a memory cap of {cap_bytes} bytes, must be >= 0 (0: none)")
        self.cap_bytes = cap_bytes
        self.live_bytes = self.peak_bytes = 0
        self._sizes: dict[int, int] = {}
        self._watched: dict[int, weakref.ref[Any]] = {}
        self._num_paused = 0
        self._counts_fake = False

    def __enter__(self) -> Ledger:
        # Where tensors are real, those of libraries that only ask for shapes hold nothing.
        self._counts_fake = detect_fake_mode() is not None
        _active.append(self)
        super().__enter__()
        return self

    def __exit__(self, *error: Any) -> None:
        super().__exit__(*error)
        _active.remove(self)

    def reset_peak(self) -> None:
        """From now on, the largest counts anew."""
        self.peak_bytes = self.live_bytes

    def __torch_dispatch__(
        self, function: Any, types: Any, args: Any = (), kwargs: Any = None
    ) -> Any:
        """Run it, then look at what came out."""
        if any(hasattr(one, "__tensor_flatten__") for one in types):
            return NotImplemented  # made of other tensors (DTensor): their operations come here
        out = function(*args, **(kwargs or {}))
        if not self._num_paused:
            if isinstance(out, torch.Tensor):
                self._see(out)
            else:
                for leaf in tree_leaves(out):
                    if isinstance(leaf, torch.Tensor):
                        self._see(leaf)
        return out

    def resize(self, storage: torch.UntypedStorage, num_bytes: int) -> None:
        """Resize a storage, which no operation shows; beyond the cap it does not happen."""
        key = storage._cdata
        if key in self._sizes:
            self._set(key, num_bytes)
        storage.resize_(num_bytes)

    def _see(self, tensor: torch.Tensor) -> None:
        # Asking a fake tensor for its device is an operation again, and as slow as one.
        fake_device = getattr(tensor, "fake_device", None)
        if (fake_device or tensor.device).type == "meta" or (fake_device and not self._counts_fake):
            return
        # A tensor that is split over ranks says the size of the whole; here is its part.
        storage = getattr(tensor, "_local_tensor", tensor).untyped_storage()
        key = storage._cdata
        if key in self._sizes:
            return

        def drop(_: object) -> None:
            self.live_bytes -= self._sizes.pop(key, 0)
            self._watched.pop(key, None)

        self._sizes[key] = 0
        self._watched[key] = weakref.ref(storage, drop)
        self._set(key, storage.nbytes())

    def _set(self, key: int, num_bytes: int) -> None:
        asked = num_bytes - self._sizes[key]
        if self.cap_bytes and asked > 0 and self.live_bytes + asked > self.cap_bytes:
            raise EmulatedOutOfMemory(
                asked_bytes=asked, live_bytes=self.live_bytes, cap_bytes=self.cap_bytes
            )
        self._sizes[key] = num_bytes
        self.live_bytes += asked
        self.peak_bytes = max(self.peak_bytes, self.live_bytes)

    @contextmanager
    def paused(self) -> Iterator[None]:
        """What is made inside is not counted."""
        self._num_paused += 1
        try:
            yield
        finally:
            self._num_paused -= 1


_active: list[Ledger] = []


def active_ledger() -> Ledger | None:
    """The one that counts now, if any."""
    return _active[-1] if _active else None


def resize_storage(tensor: torch.Tensor, num_bytes: int) -> None:
    """Give a tensor's memory back, or take it again; counted where somebody counts."""
    storage = tensor.untyped_storage()
    ledger = active_ledger()
    if ledger is None:
        storage.resize_(num_bytes)
    else:
        ledger.resize(storage, num_bytes)


@contextmanager
def host_memory() -> Iterator[None]:
    """Tensors made inside stand in host memory, not on the (emulated) device."""
    ledger = active_ledger()
    if ledger is None:
        yield
        return
    with ledger.paused():
        yield


VARIABLE: Final = "DRYSTONE_EMULATE"
KINDS: Final = ("forward", "backward", "head")  # sections of the engine
# Costs that nobody gave are measured in the first step, times this: at 12 to 15 % of real work
# ratios were seen to repeat within 2 %.
SLOWDOWN: Final = 8.0


class Pacer:
    """A device of a given speed: `seconds` is what one sample costs at speed 1, by kind of section.

    Kinds are those of the engine: `forward` and `backward` (of one block, with recomputation), and
    `head`. What is left out costs nothing. Without any, the first step is measured, and `adopt`
    must be called with what came out of it over all ranks. A `table` of seconds with 1, 2, 3 ...
    samples, at the full speed of this device, goes before both.
    """

    def __init__(
        self,
        *,
        speed: float,
        seconds: Mapping[str, float],
        table: Mapping[str, Sequence[float]] | None = None,
    ) -> None:
        if speed <= 0:
            raise InvalidSpec(f"an emulated device of speed {speed}, must be > 0")
        self.speed, self._full_speed, self._seconds = speed, speed, dict(seconds)
        self._table = dict(table or {})
        self._measured: defaultdict[str, list[float]] = defaultdict(list)
        self._end = 0.0
        self.num_sections = self.overruns = 0

    @property
    def is_measuring(self) -> bool:
        """Whether sections are only measured so far."""
        return not self._seconds and not self._table

    @contextmanager
    def section(self, kind: str, num_samples: int) -> Iterator[None]:
        """Work that takes this long on the emulated device."""
        started, worked = time.perf_counter(), time.thread_time()
        yield
        if self.is_measuring:
            self._measured[kind].append((time.thread_time() - worked) / max(num_samples, 1))
        else:
            self.wait_until_done(kind, num_samples, started=started)

    def wait_until_done(self, kind: str, num_samples: int, *, started: float) -> None:
        """Sleep until work that began at `started` would have ended on the emulated device."""
        cost = self.cost(kind, num_samples)
        self._end = max(self._end, started) + cost
        self.num_sections += 1
        self.overruns += cost > 0 and time.perf_counter() > self._end
        while (left := self._end - time.perf_counter()) > 0:
            time.sleep(left)

    def cost(self, kind: str, num_samples: int) -> float:
        """Seconds of a section; beyond the table each sample costs what its last row has."""
        row = self._table.get(kind)
        if row and num_samples > 0:
            known = min(num_samples, len(row))
            return row[known - 1] * num_samples / known * self._full_speed / self.speed
        return self._seconds.get(kind, 0.0) * num_samples / self.speed

    def measured_seconds(self) -> dict[str, float]:
        """The median of what a sample took here, by kind, while measuring."""
        if not self.is_measuring:
            return {}
        return {kind: statistics.median(some) for kind, some in self._measured.items()}

    def adopt(self, seconds: Mapping[str, float]) -> None:
        """End measuring: these are the costs of a sample at speed 1, the same on every rank."""
        self._seconds = dict(seconds)


@dataclass(frozen=True, slots=True, kw_only=True)
class EmulatedDevice:
    """What one rank pretends to be."""

    speed: float = 0.0  # relative to the other ranks; 0: as fast as it is
    memory_bytes: int = 0  # of live tensors; 0: any
    # For trials with stragglers: from this step on it has that part of its speed.
    slows_at_step: int = 0
    slows_to: float = 1.0
    # Seconds of sections with 1, 2, 3 ... samples, by kind; none: by the speed alone.
    seconds: dict[str, tuple[float, ...]] = field(default_factory=dict)

    def __post_init__(self) -> None:
        if self.speed < 0 or self.memory_bytes < 0 or self.slows_to <= 0:
            raise InvalidSpec(
                f"an emulated device of speed {self.speed}, {self.memory_bytes} bytes, slowing "
                f"to {self.slows_to}: none may be negative, the last not 0"
            )

    def make_ledger(self) -> Ledger | None:
        """What counts its memory, if it has a limit."""
        return Ledger(self.memory_bytes) if self.memory_bytes else None

    def make_pacer(self, seconds: Mapping[str, float]) -> Pacer | None:
        """What slows it down, if anything does."""
        if not self.speed:
            return None
        return Pacer(speed=self.speed, seconds=seconds, table=self.seconds)

    def speed_at(self, step: int) -> float:
        """Its speed in that step, the first of which is 1."""
        is_slow = 0 < self.slows_at_step <= step
        return self.speed * (self.slows_to if is_slow else 1.0)


@dataclass(frozen=True, slots=True, kw_only=True)
class Emulation:
    """Devices by rank, or by the GPU type that the plan gives a rank."""

    ranks: tuple[EmulatedDevice, ...] = ()
    gpus: dict[str, EmulatedDevice] = field(default_factory=dict)
    seconds: dict[str, float] = field(default_factory=dict)  # a sample at speed 1, by kind

    def device_of(self, rank: int, gpu: str) -> EmulatedDevice:
        """What a rank pretends to be."""
        if gpu in self.gpus:  # also a type of the user's own, which no catalogue here knows
            return self.gpus[gpu]
        for name, device in self.gpus.items():
            if gpu and find_gpu(name) == find_gpu(gpu):
                return device
        if not self.gpus and rank < len(self.ranks):
            return self.ranks[rank]
        raise InvalidSpec(
            f"rank {rank} ({gpu or 'of no GPU type'}) is not among the emulated devices",
            where=VARIABLE,
        )


def read_emulation(text: str, plan: Plan | None = None) -> Emulation | None:
    """What DRYSTONE_EMULATE says: nothing, `plan`, or JSON with `ranks` or `gpus`."""
    if not text:
        return None
    if text == "plan":
        if plan is None:
            raise InvalidSpec("there is no plan to take devices from", where=VARIABLE)
        return emulation_of_plan(plan)
    try:
        table = json.loads(text)
    except ValueError as error:
        raise InvalidSpec(
            f"is no JSON: {error}",
            where=VARIABLE,
            hint='E.g. {"ranks": [{"speed": 1}, {"speed": 3}]}',
        ) from None
    return from_plain(Emulation, table, where=VARIABLE)


def emulation_of_plan(plan: Plan) -> Emulation:
    """GPU types as the catalogue has them: dense 16-bit rates, memory as in the plan."""
    rates = {}
    for name in plan.gpus:
        gpu = find_gpu(name)
        rates[name] = gpu.bf16_flops or gpu.fp16_flops or gpu.fp32_flops
    usable = {need.gpu: need.usable_bytes for need in plan.needs}
    slowest = min(rates.values())
    return Emulation(
        gpus={
            name: EmulatedDevice(speed=rate / slowest, memory_bytes=int(usable.get(name, 0)))
            for name, rate in rates.items()
        }
    )


def rank_gpus(plan: Plan) -> list[str]:
    """The GPU type of every rank, in the order of the plan."""
    return [share.gpu for stage in plan.stages for share in stage.ranks for _ in range(share.count)]
