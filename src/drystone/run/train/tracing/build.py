"""From `module.py:function` to a module of fake tensors, without allocating a weight.

The function runs under the `meta` device, where a tensor is a shape. That counts every parameter of
the full depth in milliseconds. The blocks that are traced then get fake CPU tensors, because `meta`
tensors would choose other attention kernels. A CPU build of torch has no fake CUDA tensors.
"""

from __future__ import annotations

import importlib.util
import inspect
import sys
import traceback
from collections.abc import Callable, Mapping
from pathlib import Path
from types import ModuleType
from typing import Any

import torch
from torch import nn
from torch.nn import functional as F  # noqa: N812  # torch's own custom
from torch.overrides import TorchFunctionMode
from torch.utils._device import _device_constructors

from drystone.estimate.module.trace import TraceRequest
from drystone.run.train.models.layered import turn_caches_off


class TraceFailure(Exception):
    """The module cannot be traced; it is the user's file that has to change."""

    def __init__(self, message: str, *, where: str = "", hint: str = "") -> None:
        self.message = message
        self.where = where
        self.hint = hint
        super().__init__(message)


def user_line(error: BaseException, path: str) -> str:
    """`file:line` of the deepest frame in the user's file, else of the deepest frame beside it."""
    frames = traceback.extract_tb(error.__traceback__)
    file = Path(path).resolve()
    own = [frame for frame in frames if Path(frame.filename).resolve() == file]
    beside = [frame for frame in frames if file.parent in Path(frame.filename).resolve().parents]
    for frame in reversed(own or beside):
        return f"{frame.filename}:{frame.lineno}"
    return path


def last_line(error: BaseException) -> str:
    """The line that Python would print last, without its further lines."""
    text = traceback.format_exception_only(error)[-1].strip().splitlines()
    return text[0] if text else type(error).__name__


_SMALL_NUMEL = 65536
_INITIALISERS = {
    "uniform_",
    "normal_",
    "trunc_normal_",
    "kaiming_uniform_",
    "kaiming_normal_",
    "xavier_uniform_",
    "xavier_normal_",
    "orthogonal_",
    "exponential_",
    "bernoulli_",
    "zeros_",
    "ones_",
    "constant_",
    "zero_",
    "fill_",
}


def load_source(path: str) -> ModuleType:
    """The user's file, imported; its folder is importable too."""
    file = Path(path)
    if not file.is_file():
        raise TraceFailure("no such file", where=path)
    sys.path.insert(0, str(file.resolve().parent))
    spec = importlib.util.spec_from_file_location(file.stem, file)
    if spec is None or spec.loader is None:
        raise TraceFailure("not a Python file", where=path, hint="Its name must end in .py")
    source = importlib.util.module_from_spec(spec)
    sys.modules.setdefault(file.stem, source)
    try:
        spec.loader.exec_module(source)
    except (Exception, SystemExit) as error:
        where = (
            f"{path}:{error.lineno}" if isinstance(error, SyntaxError) else user_line(error, path)
        )
        hint = "The file must import cleanly"
        raise TraceFailure(last_line(error), where=where, hint=hint) from error
    return source


def build_module(source: ModuleType, function: str, path: str) -> nn.Module:
    """Call the user's function where tensors have shapes only."""
    builder = getattr(source, function, None)
    if not callable(builder):
        here = [value for value in vars(source).values() if callable(value)]
        own = [
            function.__name__
            for function in here
            if getattr(function, "__module__", "") == source.__name__
        ]
        hint = "It has: " + (", ".join(own[:8]) or "no function at all")
        raise TraceFailure(f"no function {function!r}", where=path, hint=hint)
    try:
        module = _built(builder)
    except (Exception, SystemExit) as error:
        raise TraceFailure(
            f"{function}() raised {last_line(error)}",
            where=user_line(error, path),
            hint="It must return a torch.nn.Module and take no argument",
        ) from error
    if not isinstance(module, nn.Module):
        raise TraceFailure(
            f"{function}() returned {type(module).__name__}, not a torch.nn.Module", where=path
        )
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

    for part in module.modules():
        for table in (part._parameters, part._buffers):
            for name, tensor in table.items():
                if tensor is not None:
                    table[name] = fresh(tensor, cast=True)
        for name, value in list(vars(part).items()):  # tensors that are neither, as rotary tables
            if not name.startswith("_"):
                vars(part)[name] = _replaced(value, lambda tensor: fresh(tensor, cast=False))


def _replaced(value: Any, fresh: Callable[[torch.Tensor], torch.Tensor]) -> Any:
    if isinstance(value, torch.Tensor):
        return fresh(value)
    if type(value) in (list, tuple) and any(isinstance(item, torch.Tensor) for item in value):
        return type(value)(_replaced(item, fresh) for item in value)
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


HINT = (
    "Say what it takes: add `def example_batch(micro_batch, seq_len)` to the file (or a method "
    "`drystone_batch` to the module) that returns a tensor, a tuple or a dict of arguments"
)
_TARGET_NAMES = ("labels", "targets", "target")
_IMAGE_SIZES = ("image_size", "img_size")


class Batch:
    """The arguments of one forward pass."""

    def __init__(self, given: Any) -> None:
        self.args: tuple[Any, ...] = ()
        self.kwargs: dict[str, Any] = {}
        if isinstance(given, Mapping):
            self.kwargs = dict(given)
        else:
            self.args = tuple(given) if isinstance(given, tuple | list) else (given,)

    def loss_of(self, module: nn.Module, source: ModuleType) -> torch.Tensor:
        """Run the module forward and reduce what it returns to one number."""
        output = module(*self.args, **self.kwargs)
        named: Callable[..., torch.Tensor] | None = getattr(
            module, "drystone_loss", getattr(source, "example_loss", None)
        )
        return named(output) if named is not None else _loss(output)


def make_batch(module: nn.Module, source: ModuleType, request: TraceRequest) -> Batch:
    """One micro-batch for this module, made in the current (fake) mode."""
    given = getattr(module, "drystone_batch", getattr(source, "example_batch", None))
    if given is not None:
        return Batch(_as_compute_dtype(given(request.micro_batch, request.seq_len), request))
    names = _argument_names(module)
    if "input_ids" in names:
        return Batch(_hugging_face_text(names, request))
    first = _first_layer(module)
    if "pixel_values" in names or isinstance(first, nn.Conv2d):
        return Batch(_image(module, first, names, request))
    if isinstance(first, nn.Embedding):
        tokens = torch.zeros(request.micro_batch, request.seq_len, dtype=torch.long)
        targets = {name: tokens for name in names[1:] if name in _TARGET_NAMES}
        return Batch({names[0]: tokens, **targets})
    if isinstance(first, nn.Linear):
        shape = [request.micro_batch, first.in_features]
        if any("attention" in type(part).__name__.lower() for part in module.modules()):
            shape.insert(1, request.seq_len)
        return Batch(torch.zeros(shape, dtype=getattr(torch, request.dtype)))
    raise TraceFailure(
        f"cannot tell what {type(module).__name__}.forward({', '.join(names)}) takes", hint=HINT
    )


def _hugging_face_text(names: list[str], request: TraceRequest) -> dict[str, Any]:
    tokens = torch.zeros(request.micro_batch, request.seq_len, dtype=torch.long)
    batch: dict[str, Any] = {"input_ids": tokens}
    if "labels" in names:
        batch["labels"] = tokens
    elif "decoder_input_ids" in names:
        batch["decoder_input_ids"] = tokens
    if "use_cache" in names:
        batch["use_cache"] = False
    return batch


def _image(
    module: nn.Module, first: nn.Module | None, names: list[str], request: TraceRequest
) -> dict[str, Any]:
    config = getattr(module, "config", None)
    named = [getattr(owner, name, None) for owner in (config, module) for name in _IMAGE_SIZES]
    size = next(filter(None, named), 224)
    height, width = size if isinstance(size, tuple | list) else (size, size)
    channels = first.in_channels if isinstance(first, nn.Conv2d) else 3
    pixels = torch.zeros(
        request.micro_batch, channels, height, width, dtype=getattr(torch, request.dtype)
    )
    batch: dict[str, Any] = {"pixel_values" if "pixel_values" in names else names[0]: pixels}
    has_classes = getattr(config, "num_labels", 0) and "Classification" in type(module).__name__
    if "labels" in names and has_classes:
        batch["labels"] = torch.zeros(request.micro_batch, dtype=torch.long)
    return batch


def _loss(output: Any) -> torch.Tensor:
    if isinstance(output, Mapping) and output.get("loss") is not None:
        return output["loss"]
    if getattr(output, "loss", None) is not None:
        return output.loss
    values = output.values() if isinstance(output, Mapping) else output
    tensors = (
        [output]
        if isinstance(output, torch.Tensor)
        else [
            value
            for value in values
            if isinstance(value, torch.Tensor) and value.is_floating_point()
        ]
    )
    for tensor in tensors:
        if tensor.dim() == 0:
            return tensor
    if not tensors:
        raise TraceFailure(
            f"forward returned {type(output).__name__} without a float tensor",
            hint="Return a loss or logits, or add `def example_loss(output)` to the file",
        )
    logits = tensors[0]
    if logits.dim() in (2, 3) and logits.shape[-1] > 1:
        targets = torch.zeros(logits.shape[:-1], dtype=torch.long)
        return F.cross_entropy(logits.flatten(0, -2).float(), targets.flatten())
    return logits.float().square().mean()


def _argument_names(module: nn.Module) -> list[str]:
    kinds = (
        inspect.Parameter.POSITIONAL_ONLY,
        inspect.Parameter.VAR_POSITIONAL,
        inspect.Parameter.VAR_KEYWORD,
    )
    parameters = inspect.signature(module.forward).parameters.values()
    return [parameter.name for parameter in parameters if parameter.kind not in kinds] or ["input"]


def _first_layer(module: nn.Module) -> nn.Module | None:
    layers = (nn.Embedding, nn.Conv2d, nn.Linear)
    return next((part for part in module.modules() if isinstance(part, layers)), None)


def _as_compute_dtype(given: Any, request: TraceRequest) -> Any:
    """Float inputs in the dtype of the weights, as every training loop hands them over."""
    if isinstance(given, torch.Tensor):
        return given.to(getattr(torch, request.dtype)) if given.is_floating_point() else given
    if isinstance(given, Mapping):
        return {key: _as_compute_dtype(value, request) for key, value in given.items()}
    if isinstance(given, tuple | list):
        return tuple(_as_compute_dtype(item, request) for item in given)
    return given
