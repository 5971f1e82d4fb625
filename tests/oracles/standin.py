"""A stand-in for an accelerator: what a step would do on a GPU, asked without one.

torch's place for other people's devices (`privateuseone`) is taken by one whose tensors are fake:
they have shapes, a dtype and a device, and no bytes. The engine runs unchanged on it. `Watch` sees
every operation and notes

    a tensor on the wrong device    torch's own fake tensors refuse to mix devices
    a host that waits               copies that block, numbers that are read, events waited for
    a race between two streams      what one writes and another uses without an event between
    the dtypes of matrix products   a silent up-cast shows there

Streams and events are the device module's own (`Stream`, `Event`): torch asks it for them as it
asks `torch.cuda`. Races are found by clocks: of every stream, how much of every other it has
waited for.
"""

from __future__ import annotations

import traceback
import weakref
from collections import defaultdict
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import torch
from torch.nn import functional as F  # noqa: N812  # torch's own custom
from torch.utils._python_dispatch import TorchDispatchMode
from torch.utils._pytree import tree_leaves
from torch.utils.backend_registration import _setup_privateuseone_for_python_backend

NAME = "standin"
_KIND = 20  # of device, as torch numbers them: `privateuseone`
DEVICE = torch.device("cpu")  # until `install`
Clock = dict[int, int]  # of each stream, how many of its operations


class Race(AssertionError):
    """On an accelerator this would compute with what is not there yet, or not any more."""


class Stream(torch.Stream):
    """Operations in order; `clock` says what they come after."""

    def __new__(cls, device: Any = None, **_: Any) -> Stream:
        return super().__new__(cls, stream_id=len(STREAMS), device_index=0, device_type=_KIND)

    def __init__(self, device: Any = None, **_: Any) -> None:
        self.number = len(STREAMS)
        self.clock: Clock = defaultdict(int)
        STREAMS.append(self)

    def wait_event(self, event: Event) -> None:
        _join(self.clock, event.clock)

    def wait_stream(self, other: Stream) -> None:
        _join(self.clock, other.clock)


class Event:
    """A moment of a stream."""

    def __init__(self, enable_timing: bool = False, **_: Any) -> None:
        self.clock: Clock = {}
        self.number = 0

    def record(self, stream: Stream | None = None) -> None:
        stream = stream or module.current_stream()
        self.clock, self.number = dict(stream.clock), stream.clock[stream.number]

    def synchronize(self) -> None:
        note_wait("an event is waited for")
        _join(HOST, self.clock)

    def elapsed_time(self, later: Event) -> float:
        return float(later.number - self.number)  # milliseconds: one for each operation


STREAMS: list[Stream] = []
HOST: Clock = defaultdict(int)


def _join(clock: Clock, other: Clock) -> None:
    for stream, number in other.items():
        clock[stream] = max(clock[stream], number)


class StandinModule:
    """What `torch.standin` is: as much of `torch.cuda` as the runtime asks for."""

    Stream, Event = Stream, Event

    def __init__(self) -> None:
        self._current: list[Stream] = []
        self.default_generators = (torch.Generator(),)
        self.devices_set: list[Any] = []

    def current_stream(self, device: Any = None) -> Stream:
        if not self._current:
            self._current.append(Stream())
        return self._current[-1]

    @contextmanager
    def stream(self, stream: Stream) -> Iterator[None]:
        self.current_stream()
        self._current.append(stream)
        try:
            yield
        finally:
            self._current.pop()

    def max_memory_allocated(self, device: Any = None) -> int:
        return 0

    def set_device(self, device: Any) -> None:
        self.devices_set.append(device)

    def init(self) -> None: ...

    def is_available(self) -> bool:
        return True

    def is_initialized(self) -> bool:
        return True

    def _is_in_bad_fork(self) -> bool:
        return False

    def current_device(self) -> int:
        return 0

    def device_count(self) -> int:
        return 1

    def get_rng_state(self, device: Any = None) -> torch.Tensor:
        return self.default_generators[0].get_state()

    def set_rng_state(self, state: torch.Tensor, device: Any = None) -> None:
        self.default_generators[0].set_state(state)

    def manual_seed_all(self, seed: int) -> None:
        self.default_generators[0].manual_seed(seed)

    def get_amp_supported_dtype(self) -> list[torch.dtype]:
        return [torch.float16, torch.bfloat16]


module = StandinModule()


def install() -> torch.device:
    """Once a process; the device."""
    global DEVICE
    if DEVICE.type != NAME:
        _setup_privateuseone_for_python_backend(NAME, backend_module=module)
        DEVICE = torch.device(NAME, 0)
    return DEVICE


_active: list[Watch] = []
_PRODUCTS = ("mm", "addmm", "bmm", "baddbmm")


def note_wait(what: str) -> None:
    for watch in _active:
        watch.waits.append((what, _caller()))


class Watch(TorchDispatchMode):
    """Sees every operation inside `with`."""

    def __init__(self) -> None:
        super().__init__()
        self.waits: list[tuple[str, str]] = []  # of the host: what, and where in the runtime
        self.products: set[torch.dtype] = set()
        self.attentions: set[str] = set()
        self.num_copies_beside = 0  # on other streams than the first
        self._written: dict[int, tuple[int, int]] = {}  # storage: stream, number
        self._used: dict[int, Clock] = {}
        self._shared: set[int] = set()  # the allocator knows of other streams (`record_stream`)
        self._home: dict[int, int] = {}  # the stream whose memory it is
        self.races: list[str] = []
        self._attention: Any = None

    def __enter__(self) -> Watch:
        _active.append(self)
        self._attention, F.scaled_dot_product_attention = F.scaled_dot_product_attention, _attend
        return super().__enter__()

    def __exit__(self, *error: Any) -> None:
        super().__exit__(*error)
        F.scaled_dot_product_attention = self._attention
        _active.remove(self)

    def __torch_dispatch__(self, function: Any, types: Any, args: Any = (), kwargs: Any = None):
        kwargs = kwargs or {}
        if any(hasattr(one, "__tensor_flatten__") for one in types):
            return NotImplemented
        given = [one for one in tree_leaves((args, kwargs)) if isinstance(one, torch.Tensor)]
        name = function._schema.name.removeprefix("aten::")
        if name == "record_stream":
            self._shared.add(_key(args[0]))
            return None
        out = function(*args, **kwargs)
        made = [one for one in tree_leaves(out) if isinstance(one, torch.Tensor)]
        self._see_waits(name, args, kwargs, made)
        if kwargs.get("pin_memory"):
            for one in made:
                pin(one)
        is_attention = "scaled_dot_product" in name and "backward" not in name
        if name in _PRODUCTS or is_attention:
            self.attentions |= {name} if is_attention else set()
            self.products |= {one.dtype for one in given if one.is_floating_point()}
        if name != "prim::device":
            self._see_order(function, args, kwargs, given, made)
        return out

    def _see_waits(self, name: str, args: Any, kwargs: Any, made: list[torch.Tensor]) -> None:
        if name == "_local_scalar_dense" and _is_here(args[0]):
            note_wait("a number is read")
        if name not in ("_to_copy", "copy_"):
            return
        source = args[1] if name == "copy_" else args[0]
        target = args[0] if name == "copy_" else made[0]
        if _is_here(source) == _is_here(target):
            return
        is_free = kwargs.get("non_blocking", False) or (len(args) > 2 and bool(args[2]))
        host = target if _is_here(source) else source
        if not is_free:
            note_wait("a copy blocks")
        elif not is_pinned(host):
            note_wait("a copy from or to memory that is not pinned")
        elif module.current_stream().number:
            self.num_copies_beside += 1

    def _see_order(
        self, function: Any, args: Any, kwargs: Any, given: list[Any], made: list[Any]
    ) -> None:
        """That nothing is used before whoever made it, on another stream, was waited for."""
        is_of_host = not any(_is_here(one) for one in [*given, *made])
        stream = module.current_stream()
        if not is_of_host:
            stream.clock[stream.number] += 1
        clock, number = (HOST, 0) if is_of_host else (stream.clock, stream.clock[stream.number])
        changed = _changed(function, args, kwargs)
        for one in given:
            key = _key(one)
            by, at = self._written.get(key, (stream.number, 0))
            if clock[by] < at:
                self.races.append(f"{function}: used before it was written, {_caller()}")
            for other, last in self._used.get(key, {}).items() if key in changed else ():
                if clock[other] < last:
                    self.races.append(f"{function}: changed while it is read, {_caller()}")
        for one in [*given, *made]:
            key = _key(one)
            if key not in self._home:
                self._home[key] = stream.number
                weakref.finalize(one.untyped_storage(), self._freed, key, _is_here(one))
            self._used.setdefault(key, defaultdict(int))[stream.number] = number
        for key in changed | {_key(one) for one in made} - {_key(one) for one in given}:
            self._written[key] = (stream.number, number)

    def _freed(self, key: int, is_here: bool) -> None:
        """Its memory is used again by whatever is asked of its stream from now on.

        Pinned memory is given back by the host, whose allocator waits for copies itself.
        """
        home, used = self._home.pop(key, 0), self._used.pop(key, {})
        self._written.pop(key, None)
        is_shared = key in self._shared or not is_here
        self._shared.discard(key)
        clock = STREAMS[home].clock if home < len(STREAMS) else {}
        for other, last in used.items():
            if other != home and clock[other] < last and not is_shared:
                self.races.append(f"freed while stream {other} uses it, {_caller()}")


def _attend(
    query: Any, key: Any, value: Any, attn_mask: Any = None, is_causal: bool = False,
    scale: float | None = None, enable_gqa: bool = False,
) -> torch.Tensor:  # fmt: skip
    """Flash attention, or with a mask the memory-efficient one, as torch chooses on an A100."""
    assert enable_gqa or key.shape[1] == query.shape[1]
    if attn_mask is None and query.dtype in (torch.float16, torch.bfloat16):
        found = torch.ops.aten._scaled_dot_product_flash_attention(
            query, key, value, 0.0, is_causal, scale=scale
        )
        return found[0]
    assert not enable_gqa, "only flash attention has groups: torch would take the slow kernel"
    if attn_mask is not None:
        attn_mask = torch.zeros_like(attn_mask, dtype=query.dtype)
    return torch.ops.aten._scaled_dot_product_efficient_attention(
        query, key, value, attn_mask, True, 0.0, is_causal, scale=scale
    )[0]


_PINNED: set[int] = set()


def pin(tensor: torch.Tensor) -> torch.Tensor:
    """Fake tensors do not know of pinned memory: these are remembered."""
    key = _key(tensor)
    _PINNED.add(key)
    weakref.finalize(tensor.untyped_storage(), _PINNED.discard, key)
    return tensor


def is_pinned(tensor: torch.Tensor) -> bool:
    return _key(tensor) in _PINNED


def _key(tensor: torch.Tensor) -> int:
    return int(tensor.untyped_storage()._cdata)


def _is_here(tensor: Any) -> bool:
    return isinstance(tensor, torch.Tensor) and tensor.device.type == NAME


def _changed(function: Any, args: Any, kwargs: Any) -> set[int]:
    found = set()
    for index, argument in enumerate(function._schema.arguments):
        if argument.alias_info is not None and argument.alias_info.is_write:
            value = args[index] if index < len(args) else kwargs.get(argument.name)
            found |= {_key(one) for one in tree_leaves(value) if isinstance(one, torch.Tensor)}
    return found


def _caller() -> str:
    """Where in the runtime."""
    for frame in reversed(traceback.extract_stack()):
        if "/run/train/" in frame.filename:
            return f"{Path(frame.filename).stem}.{frame.name}"
    return "elsewhere"
