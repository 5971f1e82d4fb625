"""How fast is this device really? Times what the speed estimate is built from.

    python -m drystone.run.train.measure PROFILE.json [--quick]

Standard output carries one JSON object a line, `{"done": n, "of": m, "what": text}`, while it
works; the profile goes to the file. The device is the first GPU, or the processor where there is
none. Collectives are timed among the GPUs of the machine (NCCL), or among processes (gloo).

A GPU that has just begun to work is faster than one that trains: its clock falls as it warms and as
its power is limited. So it is heated first, and everything is then timed call after call for some
seconds, a minute in all; `--quick` times bursts, and says so in the profile's source.
"""

from __future__ import annotations

import json
import os
import platform
import socket
import statistics
import sys
import tempfile
import time
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from pathlib import Path

import torch
import torch.distributed as dist
import torch.multiprocessing as mp

from drystone.describe.profile import (
    Profile,
    TimedAttention,
    TimedCollective,
    TimedMatmul,
    save_profile,
)

# (tokens, outputs, depth): from the narrow layers of small models to the wide ones of large.
_GPU_SHAPES = tuple(
    (tokens, width, depth)
    for tokens in (1024, 4096, 16384)
    for width, depth in ((1024, 1024), (4096, 4096), (14336, 4096), (4096, 14336))
)
_CPU_SHAPES = tuple(
    (tokens, width, depth)
    for tokens in (64, 256, 1024)
    for width, depth in ((256, 256), (1024, 256), (1024, 1024), (256, 1024))
)
_COLLECTIVE_BYTES = (4096, 256 * 1024, 16 * 1024 * 1024)


@dataclass(frozen=True, slots=True, kw_only=True)
class _Settings:
    device: torch.device
    dtype: torch.dtype
    shapes: tuple[tuple[int, int, int], ...]
    copy_elements: int
    repeats: int
    num_ranks: int
    heat_seconds: float  # of multiplications before anything is timed; 0: bursts
    hold_seconds: float  # that each is timed for, call after call; 0: `repeats` calls, one by one
    attention: tuple[int, int, int, int]  # sequences, heads, tokens, size of a head


def main(arguments: list[str]) -> int:
    """Measure, report progress, write the profile."""
    target = Path(next(argument for argument in arguments if not argument.startswith("-")))
    settings = _make_settings(is_quick="--quick" in arguments)
    steps = len(settings.shapes) + 4
    if settings.heat_seconds:
        _report(0, steps, f"heating for {settings.heat_seconds:g} s")
        _heat(settings)
    matmuls = []
    for index, shape in enumerate(settings.shapes):
        _report(index, steps, "multiplication {} x {} x {}".format(*shape))
        matmuls.append(_time_matmul(shape, settings))
    _report(len(settings.shapes), steps, "memory bandwidth")
    bandwidth = _measure_bandwidth(settings)
    _report(len(settings.shapes) + 1, steps, "launch time")
    launch_seconds = _measure_launch(settings)
    _report(len(settings.shapes) + 2, steps, "attention")
    attention = _time_attention(settings)
    _report(len(settings.shapes) + 3, steps, f"collectives of {settings.num_ranks} ranks")
    collectives = _measure_collectives(settings) if settings.num_ranks > 1 else ()
    profile = Profile(
        device=_device_name(settings.device),
        source=f"measured with torch {torch.__version__}, "
        + ("under sustained load" if settings.hold_seconds else "in bursts"),
        precision="fp32" if settings.dtype is torch.float32 else "bf16-mixed",
        matmuls=tuple(matmuls),
        memory_bandwidth_bytes_per_second=bandwidth,
        launch_seconds=launch_seconds,
        attention=(attention,),
        collectives=collectives,
    )
    save_profile(profile, target)
    _report(steps, steps, "written")
    return 0


def _make_settings(*, is_quick: bool) -> _Settings:
    if torch.cuda.is_available():
        return _Settings(
            device=torch.device("cuda", 0),
            dtype=torch.bfloat16 if torch.cuda.is_bf16_supported() else torch.float16,
            shapes=_GPU_SHAPES[::3] if is_quick else _GPU_SHAPES,
            copy_elements=2**28,
            repeats=5 if is_quick else 20,
            num_ranks=torch.cuda.device_count(),
            heat_seconds=0.0 if is_quick else 20.0,
            hold_seconds=0.0 if is_quick else 3.0,
            attention=(4, 32, 4096, 128),
        )
    return _Settings(
        device=torch.device("cpu"),
        dtype=torch.float32,
        shapes=_CPU_SHAPES[::3] if is_quick else _CPU_SHAPES,
        copy_elements=2**22 if is_quick else 2**25,
        repeats=3 if is_quick else 7,
        num_ranks=2,
        heat_seconds=0.0 if is_quick else 2.0,
        hold_seconds=0.0 if is_quick else 0.5,
        attention=(1, 4, 256, 64),
    )


def _report(done: int, steps: int, what: str) -> None:
    sys.stdout.write(json.dumps({"done": done, "of": steps, "what": what}) + "\n")
    sys.stdout.flush()


def _device_name(device: torch.device) -> str:
    if device.type == "cuda":
        return torch.cuda.get_device_name(device)
    return f"CPU {platform.machine()}, {torch.get_num_threads()} threads"


def _seconds_of(work: Callable[[], object], settings: _Settings) -> float:
    """The time of one call: call after call under load, or the median of bursts."""
    if not settings.hold_seconds:
        return statistics.median(_timings(work, settings))
    work()
    _wait(settings.device)
    started, num_calls, elapsed = time.perf_counter(), 0, 0.0
    while elapsed < settings.hold_seconds:
        for _ in range(settings.repeats):
            work()
        _wait(settings.device)
        num_calls += settings.repeats
        elapsed = time.perf_counter() - started
    return elapsed / num_calls


def _heat(settings: _Settings) -> None:
    """Multiply until clock and temperature are those of a long run."""
    width = settings.shapes[-1][1]
    square = torch.randn(width, width, device=settings.device, dtype=settings.dtype)
    until = time.perf_counter() + settings.heat_seconds
    while time.perf_counter() < until:
        for _ in range(settings.repeats):
            torch.mm(square, square)
        _wait(settings.device)


def _time_attention(settings: _Settings) -> TimedAttention:
    """Causal attention as torch offers it, forward, and with its backward pass."""
    sequences, heads, tokens, head_dim = settings.attention
    shape = (sequences, heads, tokens, head_dim)
    query, key, value = (
        torch.randn(shape, device=settings.device, dtype=settings.dtype, requires_grad=True)
        for _ in range(3)
    )

    def forward() -> torch.Tensor:
        return torch.nn.functional.scaled_dot_product_attention(query, key, value, is_causal=True)

    gradient = torch.ones_like(query)

    def there_and_back() -> None:
        torch.autograd.grad(forward(), (query, key, value), gradient)

    both = _seconds_of(there_and_back, settings)
    with torch.no_grad():
        ahead = _seconds_of(forward, settings)
    return TimedAttention(
        sequences=sequences,
        heads=heads,
        tokens=tokens,
        head_dim=head_dim,
        forward_seconds=ahead,
        backward_seconds=max(both - ahead, 0.1 * ahead),  # noise must not make it nothing
    )


def _timings(work: Callable[[], object], settings: _Settings) -> Iterator[float]:
    for index in range(settings.repeats + 2):
        _wait(settings.device)
        started = time.perf_counter()
        work()
        _wait(settings.device)
        if index > 1:
            yield time.perf_counter() - started


def _wait(device: torch.device) -> None:
    if device.type == "cuda":
        torch.cuda.synchronize(device)


def _time_matmul(shape: tuple[int, int, int], settings: _Settings) -> TimedMatmul:
    m, n, k = shape
    left = torch.randn(m, k, device=settings.device, dtype=settings.dtype)
    right = torch.randn(k, n, device=settings.device, dtype=settings.dtype)
    out = torch.empty(m, n, device=settings.device, dtype=settings.dtype)
    seconds = _seconds_of(lambda: torch.mm(left, right, out=out), settings)
    return TimedMatmul(m=m, n=n, k=k, seconds=seconds)


def _measure_bandwidth(settings: _Settings) -> float:
    """Bytes read plus bytes written by a large copy."""
    source = torch.zeros(settings.copy_elements, device=settings.device)
    target = torch.empty_like(source)
    seconds = _seconds_of(lambda: target.copy_(source), settings)
    return 2.0 * source.numel() * source.element_size() / seconds


def _measure_launch(settings: _Settings, *, num_kernels: int = 1000) -> float:
    """Host time to enqueue one kernel that does next to nothing."""
    tiny = torch.zeros(8, device=settings.device)

    def enqueue() -> None:
        for _ in range(num_kernels):
            tiny.add_(1.0)

    return _seconds_of(enqueue, settings) / num_kernels


def _measure_collectives(settings: _Settings) -> tuple[TimedCollective, ...]:
    with tempfile.TemporaryDirectory() as folder:
        answer = Path(folder) / "seconds.json"
        mp.spawn(
            _time_allreduces,
            args=(settings.num_ranks, _free_port(), settings.repeats, str(answer)),
            nprocs=settings.num_ranks,
        )
        seconds: list[float] = json.loads(answer.read_text())
    return tuple(
        TimedCollective(ranks=settings.num_ranks, num_bytes=num_bytes, seconds=one)
        for num_bytes, one in zip(_COLLECTIVE_BYTES, seconds, strict=True)
    )


def _time_allreduces(rank: int, num_ranks: int, port: int, repeats: int, answer: str) -> None:
    """One process of the group; the first one writes the times."""
    os.environ |= {"MASTER_ADDR": "127.0.0.1", "MASTER_PORT": str(port)}
    on_gpu = torch.cuda.is_available()
    dist.init_process_group("nccl" if on_gpu else "gloo", rank=rank, world_size=num_ranks)
    device = torch.device("cuda", rank) if on_gpu else torch.device("cpu")
    if on_gpu:
        torch.cuda.set_device(device)
    seconds = []
    for num_bytes in _COLLECTIVE_BYTES:
        tensor = torch.zeros(num_bytes // 4, device=device)
        times = []
        for _ in range(repeats + 2):
            dist.barrier()
            _wait(device)
            started = time.perf_counter()
            dist.all_reduce(tensor)
            _wait(device)
            times.append(time.perf_counter() - started)
        seconds.append(statistics.median(times[2:]))
    if rank == 0:
        Path(answer).write_text(json.dumps(seconds))
    dist.destroy_process_group()


def _free_port() -> int:
    with socket.socket() as probe:
        probe.bind(("127.0.0.1", 0))
        return int(probe.getsockname()[1])


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))
