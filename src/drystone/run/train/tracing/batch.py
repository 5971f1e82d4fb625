"""What does this module eat, and what is its loss?

In this order: the module's own `drystone_batch(micro_batch, seq_len)`; a function
`example_batch(micro_batch, seq_len)` in the same file; a guess from the signature of `forward` and
from the first layer. A batch is a dict (keyword arguments), a tuple (positional) or a tensor.

The loss is what the module returns if that is a scalar, has `.loss` or `["loss"]`, or is a tuple
with a scalar in it. Else the module's `drystone_loss(output)` or the file's `example_loss(output)`;
else cross-entropy in fp32 over the last dimension of token or class logits, and a mean square for
anything that is no set of logits.
"""

from __future__ import annotations

import inspect
from collections.abc import Callable, Mapping
from types import ModuleType
from typing import Any

import torch
from torch import nn
from torch.nn import functional as F  # noqa: N812  # torch's own custom

from drystone.estimate.module.trace import TraceRequest
from drystone.run.train.tracing.failure import TraceFailure

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
        if any("attention" in type(one).__name__.lower() for one in module.modules()):
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
    pixels = torch.zeros(request.micro_batch, channels, height, width,
                         dtype=getattr(torch, request.dtype))  # fmt: skip
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
    tensors = [output] if isinstance(output, torch.Tensor) else [
        one for one in values if isinstance(one, torch.Tensor) and one.is_floating_point()
    ]  # fmt: skip
    for one in tensors:
        if one.dim() == 0:
            return one
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
    kinds = (inspect.Parameter.POSITIONAL_ONLY, inspect.Parameter.VAR_POSITIONAL,
             inspect.Parameter.VAR_KEYWORD)  # fmt: skip
    parameters = inspect.signature(module.forward).parameters.values()
    return [one.name for one in parameters if one.kind not in kinds] or ["input"]


def _first_layer(module: nn.Module) -> nn.Module | None:
    layers = (nn.Embedding, nn.Conv2d, nn.Linear)
    return next((one for one in module.modules() if isinstance(one, layers)), None)


def _as_compute_dtype(given: Any, request: TraceRequest) -> Any:
    """Float inputs in the dtype of the weights, as every training loop hands them over."""
    if isinstance(given, torch.Tensor):
        return given.to(getattr(torch, request.dtype)) if given.is_floating_point() else given
    if isinstance(given, Mapping):
        return {key: _as_compute_dtype(value, request) for key, value in given.items()}
    if isinstance(given, tuple | list):
        return tuple(_as_compute_dtype(one, request) for one in given)
    return given
