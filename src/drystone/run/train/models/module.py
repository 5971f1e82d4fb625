"""A module of the user's own as a job: what of it is a block, what it is fed, where it begins.

The convention, as `docs/jobs.md` has it. `module.py:function` names a function without arguments
that returns an `nn.Module` whose forward pass returns the mean loss of its batch. Its repeated
blocks stand in one `nn.ModuleList` and are called in order, the hidden state first. The file may
say what the module is fed:

    def training_batch(tokens): ...   # (samples, length + 1) of token numbers -> arguments

Otherwise a module with `input_ids` and `labels` gets the same tokens as both, and one with two
arguments gets the tokens and those that follow them. The first embedding says how many tokens there
are.
"""

from __future__ import annotations

import inspect
from collections.abc import Callable, Sequence
from types import ModuleType
from typing import Any

import torch
from torch import nn

from drystone.describe.model import ModuleSpec
from drystone.errors import InvalidSpec
from drystone.run.train.data.tokens import TokenSource
from drystone.run.train.models.layered import Batch, NamedBlocks
from drystone.run.train.recomputation import check_extras, check_recomputation
from drystone.run.train.tracing.build import load_source

_COMPARED_TOKENS = 128  # of a sample, where the module takes fewer than it trains with
MakeBatch = Callable[[torch.Tensor], Batch]
_HINT = (
    "Add `def training_batch(tokens)` to the file: tokens of shape (samples, length + 1) in, the "
    "arguments of forward out, as a tensor, a tuple or a dict; or train with a script of your own "
    "(command: in docs/jobs.md)"
)


class UserModule(NamedBlocks):
    """The module with its blocks, and how its batches are made."""

    def __init__(
        self, module: nn.Module, blocks: str, make_batch: MakeBatch, *, seq_len: int
    ) -> None:
        super().__init__(module, blocks)
        self.make_batch, self._seq_len = make_batch, seq_len

    def weight(self, batch: Batch) -> float:
        """Tokens: all samples have as many."""
        return super().weight(batch) * self._seq_len

    def read_from(self, source: TokenSource) -> Callable[[Sequence[int]], Batch]:
        """Samples by number, as the module takes them."""
        return lambda samples: self.make_batch(source.read(samples))


def build_user_module(spec: ModuleSpec, *, seed: int = 0) -> UserModule:
    """Call the user's function; the same seed gives the same weights, the chance stays untouched.

    Every rank holds the whole of it in host memory once, before it is cut. What recomputation would
    make something else of is refused.
    """
    source = load_source(spec.path)
    module = build_whole(source, spec.function, spec.path, seed=seed)
    make_batch = choose_batch(module, source, spec.path)
    model = UserModule(module, spec.block_list, make_batch, seq_len=spec.seq_len)
    compare_blocks(model, spec.vocab_size, spec.seq_len)
    return model


def build_whole(source: ModuleType, function: str, path: str, *, seed: int = 0) -> nn.Module:
    """The module with its weights, as every rank builds it."""
    builder = getattr(source, function, None)
    if not callable(builder):
        raise InvalidSpec(f"has no function {function!r} any more", where=path)
    with torch.random.fork_rng(devices=[]):
        torch.manual_seed(seed)
        module = builder()
    if not isinstance(module, nn.Module):
        raise InvalidSpec(f"{function}() returned no torch.nn.Module", where=path)
    return module.train()


def choose_batch(module: nn.Module, source: ModuleType, path: str) -> MakeBatch:
    """How tokens become what the module is fed: as its file says, or as its arguments tell."""
    named = getattr(source, "training_batch", None)
    if callable(named):
        own: MakeBatch = named
        return own
    needed = [
        one.name
        for one in inspect.signature(module.forward).parameters.values()
        if one.kind in (one.POSITIONAL_ONLY, one.POSITIONAL_OR_KEYWORD)
    ]
    if {"input_ids", "labels"} <= set(needed):
        return _same_twice
    required = [
        one.name
        for one in inspect.signature(module.forward).parameters.values()
        if one.default is one.empty and one.kind is one.POSITIONAL_OR_KEYWORD
    ]
    if len(required) == 2:
        return _tokens_and_following
    name = type(module).__name__
    raise InvalidSpec(
        f"cannot tell what to feed {name}.forward({', '.join(needed)}) from a file of tokens",
        where=path,
        hint=_HINT,
    )


def count_tokens(module: nn.Module, path: str) -> int:
    """How many different tokens the module knows."""
    for one in module.modules():
        if isinstance(one, nn.Embedding):
            return int(one.num_embeddings)
    raise InvalidSpec(
        f"{type(module).__name__} has no embedding, and jobs read tokens",
        where=path,
        hint="Train it with a script of your own: command: in docs/jobs.md",
    )


def name_blocks(paths: Sequence[str], module: nn.Module, path: str) -> str:
    """The one list of blocks, by name."""
    lists = sorted(set(paths))
    if len(lists) == 1 and isinstance(module.get_submodule(lists[0]), nn.ModuleList):
        return lists[0]
    found = f"has its blocks in {', '.join(lists)}" if lists else "has no list of repeated blocks"
    raise InvalidSpec(
        f"{type(module).__name__} {found}; the engine goes through one nn.ModuleList of them",
        where=path,
        hint="Put the repeated blocks into one nn.ModuleList, or train it with a script of your "
        "own: command: in docs/jobs.md",
    )


def check_step(model: UserModule, seq_len: int) -> None:
    """One step as the engine takes it; whatever the module cannot do of it is raised."""
    tokens = torch.zeros(1, seq_len + 1, dtype=torch.long)
    batch = model.make_batch(tokens)
    hidden, extras = model.embed(batch)
    if not isinstance(hidden, torch.Tensor):
        raise InvalidSpec("its first block is not given a tensor first")
    for index in range(len(model.blocks)):
        after = model.run_block(index, hidden, extras)
        if not isinstance(after, torch.Tensor) or after.shape != hidden.shape:
            raise InvalidSpec(f"block {index} does not return what the next one takes")
        hidden = after
    loss = model.loss_sum(hidden, batch)
    if loss.dim():
        raise InvalidSpec(f"forward returned a tensor of shape {tuple(loss.shape)}, not a loss")


def compare_blocks(model: UserModule, vocab_size: int, seq_len: int) -> None:
    """Run a block with its weights as the engine does, and plainly; what differs is raised."""
    chance = torch.Generator().manual_seed(0)
    tokens = torch.randint(vocab_size, (1, seq_len + 1), generator=chance)
    short = tokens[:, : min(seq_len, _COMPARED_TOKENS) + 1]
    try:
        with torch.no_grad():
            model.run_block(0, *model.embed(model.make_batch(short)))
    except Exception:  # it takes its own length only, and what is wrong otherwise is raised below
        short = tokens
    check_recomputation(model, model.make_batch(short))
    check_extras(model, model.make_batch(tokens))


def _same_twice(tokens: torch.Tensor) -> dict[str, Any]:
    return {"input_ids": tokens[:, :-1], "labels": tokens[:, :-1]}


def _tokens_and_following(tokens: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor]:
    return tokens[:, :-1], tokens[:, 1:]
