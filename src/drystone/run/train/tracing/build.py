"""From `module.py:function` to a module of fake tensors, without allocating a weight.

The function runs under the `meta` device, where a tensor is a shape. That counts every parameter of
the full depth in milliseconds. The blocks that are traced then get fake CPU tensors, because `meta`
tensors would choose other attention kernels. A CPU build of torch has no fake CUDA tensors.
"""

from __future__ import annotations

import importlib.util
import sys
from collections.abc import Callable
from pathlib import Path
from types import ModuleType
from typing import Any

import torch
from torch import nn
from torch.overrides import TorchFunctionMode
from torch.utils._device import _device_constructors

from drystone.run.train.models.layered import turn_caches_off
from drystone.run.train.tracing.failure import TraceFailure, last_line, user_line

_SMALL_NUMEL = 65536
_INITIALISERS = {
    "uniform_", "normal_", "trunc_normal_", "kaiming_uniform_", "kaiming_normal_",
    "xavier_uniform_", "xavier_normal_", "orthogonal_", "exponential_", "bernoulli_",
    "zeros_", "ones_", "constant_", "zero_", "fill_",
}  # fmt: skip


def load_source(path: str) -> ModuleType:
    """The user's file, imported; its folder is importable too."""
    file = Path(path)
    if not file.is_file():
        raise TraceFailure("no such file", where=path, is_certain=True)
    sys.path.insert(0, str(file.resolve().parent))
    spec = importlib.util.spec_from_file_location(file.stem, file)
    if spec is None or spec.loader is None:
        raise TraceFailure("not a Python file", where=path, hint="Its name must end in .py")
    source = importlib.util.module_from_spec(spec)
    sys.modules.setdefault(file.stem, source)
    try:
        spec.loader.exec_module(source)
    except (Exception, SystemExit) as error:
        is_syntax = isinstance(error, SyntaxError)
        where = (
            f"{path}:{error.lineno}" if isinstance(error, SyntaxError) else user_line(error, path)
        )
        raise TraceFailure(last_line(error), where=where, hint="The file must import cleanly",
                           is_certain=is_syntax) from error  # fmt: skip
    return source


def build_module(source: ModuleType, function: str, path: str) -> nn.Module:
    """Call the user's function where tensors have shapes only."""
    builder = getattr(source, function, None)
    if not callable(builder):
        here = [value for value in vars(source).values() if callable(value)]
        own = [one.__name__ for one in here if getattr(one, "__module__", "") == source.__name__]
        hint = "It has: " + (", ".join(own[:8]) or "no function at all")
        raise TraceFailure(f"no function {function!r}", where=path, is_certain=True, hint=hint)
    try:
        module = _built(builder)
    except (Exception, SystemExit) as error:
        raise TraceFailure(
            f"{function}() raised {last_line(error)}",
            where=user_line(error, path),
            hint="It must return a torch.nn.Module and take no argument",
        ) from error
    if not isinstance(module, nn.Module):
        raise TraceFailure(f"{function}() returned {type(module).__name__}, not a torch.nn.Module",
                           where=path, is_certain=True)  # fmt: skip
    turn_caches_off(module)  # as in training: blocks are computed again
    return module.train()


def materialise(module: nn.Module, dtype: torch.dtype) -> None:
    """Give every parameter and buffer a tensor of the current (fake) mode, floats in `dtype`."""
    made: dict[int, torch.Tensor] = {}

    def fresh(tensor: torch.Tensor, *, cast: bool) -> torch.Tensor:
        if id(tensor) not in made:
            wide = tensor.is_floating_point() and tensor.element_size() > 1
            new = torch.empty(tensor.shape, dtype=dtype if cast and wide else tensor.dtype)
            if isinstance(tensor, nn.Parameter):
                new = nn.Parameter(new, requires_grad=tensor.requires_grad)
                vars(new).update(vars(tensor))
            made[id(tensor)] = new
        return made[id(tensor)]

    for one in module.modules():
        for table in (one._parameters, one._buffers):
            for name, tensor in table.items():
                if tensor is not None:
                    table[name] = fresh(tensor, cast=True)
        for name, value in list(vars(one).items()):  # tensors that are neither, as rotary tables
            if not name.startswith("_"):
                vars(one)[name] = _replaced(value, lambda tensor: fresh(tensor, cast=False))


def _replaced(value: Any, fresh: Callable[[torch.Tensor], torch.Tensor]) -> Any:
    if isinstance(value, torch.Tensor):
        return fresh(value)
    if type(value) in (list, tuple) and any(isinstance(one, torch.Tensor) for one in value):
        return type(value)(_replaced(one, fresh) for one in value)
    return value


def _built(builder: Callable[[], object]) -> object:
    try:
        with _OnMeta(largest_real_numel=0):
            return builder()
    except (NotImplementedError, RuntimeError):
        # It looks at values, as in `torch.linspace(0, rate, depth).tolist()`: small ones are real.
        with _OnMeta(largest_real_numel=_SMALL_NUMEL):
            return builder()


class _OnMeta(TorchFunctionMode):
    """Makes tensors on `meta`, all or the large ones, and spares the work of initialising them."""

    def __init__(self, *, largest_real_numel: int) -> None:
        super().__init__()
        self._largest_real_numel = largest_real_numel
        self._constructors = _device_constructors()

    def __torch_function__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        """Send constructors to `meta` (to see how large the outcome is), skip random numbers."""
        kwargs = kwargs or {}
        if func in self._constructors and kwargs.get("device") is None:
            shape_only = func(*args, **{**kwargs, "device": "meta"})
            small = shape_only.numel() <= self._largest_real_numel
            return func(*args, **kwargs) if small else shape_only
        name = getattr(func, "__name__", "")
        if name in _INITIALISERS:
            target = args[0] if args else kwargs.get("tensor")
            if isinstance(target, torch.Tensor) and target.is_meta:
                return target
        return func(*args, **kwargs)
