"""Repeated blocks of a module: which are alike, and which few stand for all.

A run is a list of modules (ModuleList, Sequential, ModuleDict) with many like children. The
outermost lists win: the experts inside a block are part of the block. Two blocks are alike when
classes, parameter shapes and settings agree all the way down; an attribute that differs in every
block (its index, its share of stochastic depth) says nothing. Of each kind the first, the second
and the last are kept. The second is the template for those left out, since nothing about it is
special.
"""

from __future__ import annotations

from collections import defaultdict
from collections.abc import Hashable, Iterator
from dataclasses import dataclass

from torch import nn

from drystone.describe.recipe import RecomputeKind
from drystone.estimate.module.trace import TraceRequest

_KEPT_PER_KIND = 3
_LISTS = (nn.ModuleList, nn.Sequential, nn.ModuleDict)


@dataclass(frozen=True, slots=True, kw_only=True, eq=False)
class Block:
    """One repeated block and its place."""

    module: nn.Module
    container: nn.Module
    path: str  # of the container
    position: int  # in the container
    kind: int
    is_recomputed: bool


@dataclass(frozen=True, slots=True, kw_only=True)
class Blocks:
    """All repeated blocks in the order of the module, and those that are traced."""

    every: tuple[Block, ...]
    kept: tuple[Block, ...]

    @property
    def num_kinds(self) -> int:
        """Different kinds of block."""
        return len({block.kind for block in self.every})

    def of_kind(self, kind: int, *, kept: bool = False) -> list[Block]:
        """The blocks of one kind."""
        return [block for block in (self.kept if kept else self.every) if block.kind == kind]

    def truncate(self) -> None:
        """Take all blocks that are not kept out of their module."""
        keep: defaultdict[nn.Module, list[Block]] = defaultdict(list)
        for block in self.kept:
            keep[block.container].append(block)
        for container, blocks in keep.items():
            named = isinstance(container, nn.ModuleDict)
            keys = list(container._modules)
            container._modules = {
                keys[block.position] if named else str(index): block.module
                for index, block in enumerate(blocks)
            }


def find_blocks(module: nn.Module, request: TraceRequest) -> Blocks:
    """The repeated blocks of a module; none when nothing repeats."""
    every: list[Block] = []
    kinds: dict[Hashable, int] = {}
    for path, container in _runs(module):
        children = list(container.children())
        for position, (child, signature) in enumerate(
            zip(children, _signatures(children), strict=True)
        ):
            is_recomputed = (
                request.recompute is RecomputeKind.FULL and position % request.recompute_every == 0
            )
            kind = kinds.setdefault((path, signature, is_recomputed), len(kinds))
            every.append(
                Block(
                    module=child,
                    container=container,
                    path=path,
                    position=position,
                    kind=kind,
                    is_recomputed=is_recomputed,
                )
            )
    kept = every if request.is_whole else _kept(every)
    return Blocks(every=tuple(every), kept=tuple(kept))


def _kept(every: list[Block]) -> list[Block]:
    by_kind: defaultdict[int, list[Block]] = defaultdict(list)
    for block in every:
        by_kind[block.kind].append(block)
    chosen = {
        id(block)
        for blocks in by_kind.values()
        for block in [*blocks[: _KEPT_PER_KIND - 1], blocks[-1]]
    }
    return [block for block in every if id(block) in chosen]


def _runs(module: nn.Module, path: str = "") -> Iterator[tuple[str, nn.Module]]:
    """The outermost lists of blocks, with their paths."""
    if isinstance(module, _LISTS) and _repeats(list(module.children())):
        yield path, module
        return
    for name, child in module.named_children():
        yield from _runs(child, f"{path}.{name}" if path else name)


def _repeats(children: list[nn.Module]) -> bool:
    """Whether leaving blocks out would spare anything, and these are blocks, not single layers."""
    if len(children) < 2 or len({id(child) for child in children}) < len(children):
        return False  # one child standing twice is shared, not repeated
    if any(next(child.children(), None) is None for child in children):
        return False
    return len(set(_signatures(children))) <= len(children) // 2


def _signatures(children: list[nn.Module]) -> list[Hashable]:
    """One signature each; equal ones are alike."""
    settings = [_settings(child) for child in children]
    telling = {
        key
        for key in {key for table in settings for key in table}
        if len({table.get(key) for table in settings}) < len(children)
    }
    return [
        (
            _structure(child),
            tuple(sorted((key, repr(table[key])) for key in telling & table.keys())),
        )
        for child, table in zip(children, settings, strict=True)
    ]


def _structure(block: nn.Module) -> Hashable:
    classes = tuple((name, type(one).__qualname__) for name, one in block.named_modules())
    params = tuple(
        (name, tuple(one.shape), one.requires_grad) for name, one in block.named_parameters()
    )
    buffers = tuple((name, tuple(one.shape)) for name, one in block.named_buffers())
    return classes, params, buffers


def _settings(block: nn.Module) -> dict[str, object]:
    return {
        f"{name}.{key}": value
        for name, one in block.named_modules()
        for key, value in vars(one).items()
        if isinstance(value, int | float | str) and not key.startswith("_") and key != "training"
    }
