"""A model as the engine sees it: something before the blocks, the blocks, something after them.

`LayeredModel` is what the engine drives. `NamedBlocks` makes one of any `nn.Module` whose forward
pass returns a mean loss and runs through a list of blocks, one after another: it calls the module's
own `forward`, stops it at the first block to learn what enters there, and later lets it run with
the blocks replaced by what came out of them.
"""

from __future__ import annotations

import zlib
from collections.abc import Callable, Iterable, Iterator, Sequence
from contextlib import AbstractContextManager, contextmanager, nullcontext, suppress
from typing import Any, Final, Protocol, TypeAlias

import torch
from torch import nn

from drystone.errors import InvalidSpec, UnknownName
from drystone.run.train.device import map_tensors

_LISTS = (nn.ModuleList, nn.Sequential, nn.ModuleDict)
Batch = Any  # what the model takes: a tensor, a tuple of tensors, a dict
Weight: TypeAlias = "float | torch.Tensor"  # of one element; the host need not know it
Extras = Any  # what every block takes besides the hidden state


class LayeredModel(Protocol):
    """A model in three acts."""

    @property
    def module(self) -> nn.Module:
        """Where the parameters have their names."""

    @property
    def blocks(self) -> Sequence[nn.Module]:
        """The layers, first to last."""

    @property
    def front(self) -> Sequence[nn.Parameter]:
        """What is used before the blocks."""

    @property
    def back(self) -> Sequence[nn.Parameter]:
        """What is used after the blocks; a shared parameter stands in both."""

    def embed(self, batch: Batch) -> tuple[torch.Tensor, Extras]:
        """What enters the first block."""

    def run_block(self, index: int, hidden: torch.Tensor, extras: Extras) -> torch.Tensor:
        """What leaves block `index`."""

    def loss_sum(self, hidden: torch.Tensor, batch: Batch) -> torch.Tensor:
        """The losses of the batch, summed over what counts (tokens, or samples)."""

    def weight(self, batch: Batch) -> Weight:
        """How much counts in the batch: the losses of a step are divided by the global sum."""


def place_parameters(module: nn.Module, make: Callable[[str, nn.Parameter], torch.Tensor]) -> None:
    """Put another tensor in the place of every parameter; shared ones stay shared."""
    made = {
        id(one): nn.Parameter(make(name, one), requires_grad=one.requires_grad)
        for name, one in module.named_parameters()
    }
    for part in module.modules():
        for name, one in list(part.named_parameters(recurse=False)):
            setattr(part, name, made[id(one)])


COMPILER: Final = "inductor"


def compiled(blocks: Iterable[nn.Module]) -> list[Callable[..., Any]]:
    """What to call instead of each block; compiled when it is called first."""
    calls: list[Callable[..., Any]] = [torch.compile(block, backend=COMPILER) for block in blocks]
    return calls


def seeded_normal(shape: torch.Size, std: float, seed: int, name: str) -> torch.Tensor:
    """A normal tensor that depends on the seed and the name alone."""
    chance = torch.Generator().manual_seed(zlib.crc32(f"{seed} {name}".encode()))
    return torch.zeros(shape).normal_(std=std, generator=chance)


class NamedBlocks:
    """Any module with a list of blocks by name, e.g. `transformer.h`, whose forward returns a loss.

    The loss must be a mean over the batch in which each of `weight(batch)` counts equally; by
    default these are samples. Blocks are called in order, once, the hidden state first; nothing
    that needs a gradient may reach a block by another way. Caches of keys and values are turned
    off.
    """

    def __init__(
        self,
        module: nn.Module,
        blocks: str,
        *,
        weight: Callable[[Batch], Weight] | None = None,
    ) -> None:
        found = dict(module.named_modules()).get(blocks)
        if not isinstance(found, _LISTS) or not len(found):
            lists = [name for name, one in module.named_modules() if isinstance(one, _LISTS)]
            raise UnknownName("list of blocks", blocks, lists)
        turn_caches_off(module)
        self.module, self.blocks = module, list(found.children())
        self.calls: Sequence[Callable[..., Any]] = self.blocks  # or the blocks compiled
        self.dtype = torch.float32  # that weights have in compute: whoever lays them out says
        self._weight = weight or _num_samples
        self._rest: tuple[None, ...] | None = None  # what blocks return besides, if a tuple
        inside = {id(parameter) for block in self.blocks for parameter in block.parameters()}
        around = [parameter for parameter in module.parameters() if id(parameter) not in inside]
        self.front = self.back = around

    def embed(self, batch: Batch) -> tuple[torch.Tensor, Extras]:
        """Run the module's forward up to its first block."""
        with self._replaced(_stop):
            try:
                self._call(batch)
            except _Reached as reached:
                return reached.hidden, reached.extras
        raise InvalidSpec(f"{type(self.module).__name__}.forward never calls its first block")

    def run_block(self, index: int, hidden: torch.Tensor, extras: Extras) -> torch.Tensor:
        """One block, as the module itself would call it."""
        args, kwargs = extras
        with self._narrowed(hidden.device):
            out = self.calls[index](self._cast(hidden), *args, **kwargs)
        if not isinstance(out, tuple):
            return out
        self._rest = (None,) * (len(out) - 1)
        return out[0]

    def extras_of_blocks(self, batch: Batch) -> list[Extras]:
        """What each block would be given besides the hidden state; a block was run before."""
        given: list[Extras] = []

        def skip(hidden: torch.Tensor, *args: Any, **kwargs: Any) -> Any:
            given.append((args, kwargs))
            if len(given) == len(self.blocks):
                raise _Reached(hidden, None)
            return self._returned(hidden)

        with self._replaced(skip), suppress(_Reached):
            self._call(batch)
        return given

    def loss_sum(self, hidden: torch.Tensor, batch: Batch) -> torch.Tensor:
        """Run the module's forward with the blocks' result in place of the blocks."""

        def skip(*_: Any, **__: Any) -> Any:
            return self._returned(self._cast(hidden))

        with self._replaced(skip):
            out = self._call(batch)
        loss = out if isinstance(out, torch.Tensor) else out["loss"]
        return loss.float() * self.weight(batch)

    def weight(self, batch: Batch) -> Weight:
        """Samples, or what the caller counts."""
        return self._weight(batch)

    def _returned(self, hidden: torch.Tensor) -> Any:
        """As a block returns it: alone, or first of several."""
        return hidden if self._rest is None else (hidden, *self._rest)

    def _narrowed(self, device: torch.device) -> AbstractContextManager[Any]:
        """Products in the dtype of the weights, whatever the module's buffers and inputs are."""
        if self.dtype.itemsize >= torch.float32.itemsize:
            return nullcontext()
        return torch.autocast(device.type, self.dtype)

    def _call(self, batch: Batch) -> Any:
        with self._narrowed(_first_tensor(batch).device):
            batch = map_tensors(self._cast, batch)
            if isinstance(batch, dict):
                return self.module(**batch)
            return self.module(*batch) if isinstance(batch, list) else self.module(batch)

    def _cast(self, tensor: torch.Tensor) -> torch.Tensor:
        is_wide = self.dtype.itemsize < torch.float32.itemsize and tensor.is_floating_point()
        return tensor.to(self.dtype) if is_wide else tensor

    @contextmanager
    def _replaced(self, forward: Callable[..., Any]) -> Iterator[None]:
        for block in self.blocks:
            block.forward = forward
        try:
            yield
        finally:
            for block in self.blocks:
                del block.forward


def turn_caches_off(module: nn.Module) -> None:
    """A cache filled in the forward pass would be read, and filled again, in recomputation."""
    for part in module.modules():
        config = getattr(part, "config", None)
        if config is not None and getattr(config, "use_cache", False):
            with suppress(AttributeError):  # one that cannot be changed: the module is compared
                config.use_cache = False


class _Reached(Exception):
    def __init__(self, hidden: torch.Tensor, extras: Extras) -> None:
        super().__init__("the first block")
        self.hidden, self.extras = hidden, extras


def _stop(hidden: torch.Tensor, *args: Any, **kwargs: Any) -> None:
    raise _Reached(hidden, (args, kwargs))


def _num_samples(batch: Batch) -> float:
    return float(_first_tensor(batch).shape[0])


def _first_tensor(batch: Batch) -> torch.Tensor:
    while not isinstance(batch, torch.Tensor):
        batch = next(iter(batch.values())) if isinstance(batch, dict) else batch[0]
    return batch
