"""A module of the user's own as a job: what of it is a block, what it is fed, where it begins.

The convention, as `docs/jobs.md` has it. `module.py:function` names a function without arguments
that returns an `nn.Module` whose forward pass returns the mean loss of its batch. Its repeated
blocks stand in one `nn.ModuleList` and are called in order, the hidden state first. The file may
say what the module is fed:

    def training_batch(tokens): ...   # (samples, length + 1) of token numbers -> arguments

or read samples of its own (`run/train/data/own.py`), and say how much of a batch counts in its
mean, where that is not each sample alike:

    def training_weight(batch): ...   # e.g. (batch["labels"] != -100).sum()

Otherwise a module with `input_ids` and `labels` gets the same tokens as both, and one with two
arguments gets the tokens and those that follow them. The first embedding says how many tokens there
are.
"""

from __future__ import annotations

import inspect
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from types import ModuleType
from typing import Any, Final

import torch
from torch import nn

from drystone.describe.model import ModuleSpec
from drystone.errors import InvalidSpec
from drystone.run.train.data import TokenSource
from drystone.run.train.data.own import OwnSamples, find_own_samples
from drystone.run.train.models.layered import Batch, NamedBlocks, Weight
from drystone.run.train.tracing.build import load_source

_TOLERANCE: Final = 1e-4  # of the largest value; the same operations differ by rounding at most
_SEED: Final = 20
_WEIGHED: Final = 4  # samples whose losses are compared, together and apart
_RECOMPUTATION_HINT: Final = (
    "Blocks must be functions of what they are given: switch caches and running statistics off, "
    "or train with a script of your own (command: in docs/jobs.md)"
)


def check_recomputation(model: NamedBlocks, batch: Batch) -> None:
    """Compare a block computed once with one computed again; raise with what differs."""
    before = {name: one.clone() for name, one in model.module.named_buffers()}
    with torch.random.fork_rng(devices=[]):
        once = _compute(model, batch, is_again=False)
        again = _compute(model, batch, is_again=True)
    for what, expected in once.items():
        if not _are_close(again[what], expected):
            raise InvalidSpec(
                f"the first block of {type(model.module).__name__} gives another {what} when it is "
                "computed again, as the engine does for the backward pass",
                hint=_RECOMPUTATION_HINT,
            )
    for name, one in model.module.named_buffers():
        if not torch.equal(torch.nan_to_num(one), torch.nan_to_num(before[name])):
            raise InvalidSpec(
                f"{type(model.module).__name__} changes its buffer {name} in the forward pass, "
                "which the engine runs more than once",
                hint=_RECOMPUTATION_HINT,
            )


def check_weight(model: UserModule, batch: Batch) -> None:
    """The loss of several samples must be the mean of theirs, each by its weight; or raise.

    Ranks have unlike numbers of samples: their losses are put together by what counts in each.
    """
    if any(one.dim() < 1 or len(one) != _WEIGHED for one in _tensors_of(batch)):
        return  # it cannot be told apart
    model.module.eval()
    with torch.no_grad(), torch.random.fork_rng(devices=[]):
        parts = [_sample_of(batch, at) for at in range(_WEIGHED)]
        sums = [_loss_of(model, part) for part in (batch, *parts)]
        weights = [float(model.weight(part)) for part in (batch, *parts)]
    model.module.train()
    apart = sum(sums[1:]) / max(sum(weights[1:]), 1.0)
    if not abs(apart - sums[0] / max(weights[0], 1.0)) <= _TOLERANCE * max(abs(apart), 1e-6):
        raise InvalidSpec(
            f"the loss of {type(model.module).__name__} over several samples is not the mean of "
            "theirs, so samples cannot be divided among GPUs",
            hint="If some of a sample does not count (labels of -100, a mask), add `def "
            "training_weight(batch)` to the file: how much counts, as in "
            '(batch["labels"] != -100).sum(). A loss that compares samples needs a script of your '
            "own (command: in docs/jobs.md)",
        )


def _loss_of(model: UserModule, batch: Batch) -> float:
    """Summed over what counts, with all blocks in their place."""
    hidden, extras = model.embed(batch)
    for index in range(len(model.blocks)):
        hidden = model.run_block(index, hidden, extras)
    return float(model.loss_sum(hidden, batch))


def _tensors_of(batch: Batch) -> list[torch.Tensor]:
    if isinstance(batch, torch.Tensor):
        return [batch]
    values = batch.values() if isinstance(batch, dict) else batch
    return [one for one in values if isinstance(one, torch.Tensor)]


def _sample_of(batch: Batch, at: int) -> Batch:
    """One of several, still as a batch."""
    if isinstance(batch, torch.Tensor):
        return batch[at : at + 1]
    if isinstance(batch, dict):
        return {key: _sample_of(value, at) for key, value in batch.items()}
    if isinstance(batch, tuple | list):
        return tuple(_sample_of(value, at) for value in batch)
    return batch


def check_extras(model: NamedBlocks, batch: Batch) -> None:
    """All blocks must be given the same besides the hidden state: the engine gives all the same."""
    with torch.no_grad():
        first, *others = model.extras_of_blocks(batch)
    for index, extras in enumerate(others, start=1):
        if not _are_same(extras, first):
            raise InvalidSpec(
                f"block {index} of {type(model.module).__name__} is given something else than the "
                "first one besides the hidden state, as a mask of its own",
                hint="The engine gives every block what the first one gets. Let blocks make their "
                "own masks, or train with a script of your own (command: in docs/jobs.md)",
            )


def _compute(model: NamedBlocks, batch: Batch, *, is_again: bool) -> dict[str, torch.Tensor]:
    """The output of the first block, and its gradients."""
    with torch.no_grad():
        torch.manual_seed(_SEED)
        entered, extras = model.embed(batch)
        if is_again:
            torch.manual_seed(_SEED)
            model.run_block(0, entered, extras)
    entered = entered.detach().requires_grad_()
    torch.manual_seed(_SEED)
    left = model.run_block(0, entered, extras)
    torch.manual_seed(_SEED)
    named = {
        f"gradient of {name}": one
        for name, one in model.blocks[0].named_parameters()
        if one.requires_grad
    }
    wanted = {"gradient of its input": entered, **named}
    gradients = torch.autograd.grad(
        left, list(wanted.values()), torch.randn_like(left), allow_unused=True
    )
    found = {
        name: torch.zeros(()) if one is None else one
        for name, one in zip(wanted, gradients, strict=True)
    }
    return {"output": left.detach(), **found}


def _are_close(one: torch.Tensor, other: torch.Tensor) -> bool:
    if one.shape != other.shape:
        return False
    scale = float(other.abs().max()) if other.numel() else 0.0
    return torch.allclose(one, other, rtol=0.0, atol=_TOLERANCE * scale, equal_nan=True)


def _are_same(one: Any, other: Any) -> bool:
    if one is other:
        return True
    if isinstance(one, torch.Tensor) and isinstance(other, torch.Tensor):
        return one.shape == other.shape and torch.equal(one, other)
    if type(one) is not type(other):
        return False
    if isinstance(one, dict):
        return one.keys() == other.keys() and all(_are_same(one[key], other[key]) for key in one)
    if isinstance(one, tuple | list):
        return len(one) == len(other) and all(map(_are_same, one, other))
    return bool(one == other)


_COMPARED_TOKENS = 128  # of a sample, where the module takes fewer than it trains with
MakeBatch = Callable[[torch.Tensor], Batch]
_HINT = (
    "Add `def training_batch(tokens)` to the file: tokens of shape (samples, length + 1) in, the "
    "arguments of forward out, as a tensor, a tuple or a dict; or train with a script of your own "
    "(command: in docs/jobs.md)"
)


@dataclass(frozen=True, slots=True)
class Fed:
    """What a module is fed, and what counts of it."""

    make_batch: MakeBatch
    own: OwnSamples | None = None  # instead of tokens
    weight: Callable[[Batch], Weight] | None = None  # None: every sample alike


class UserModule(NamedBlocks):
    """The module with its blocks, and how its batches are made."""

    def __init__(self, module: nn.Module, blocks: str, fed: Fed, *, seq_len: int) -> None:
        super().__init__(module, blocks)
        self.fed, self.make_batch, self._seq_len = fed, fed.make_batch, seq_len

    def weight(self, batch: Batch) -> Weight:
        """What the file counts; otherwise tokens: all samples have as many."""
        if self.fed.weight is not None:
            return self.fed.weight(batch)
        return super().weight(batch) * self._seq_len

    def read_from(self, source: TokenSource) -> Callable[[Sequence[int]], Batch]:
        """Samples by number, as the module takes them."""
        if self.fed.own is not None:
            return self.fed.own.read
        return lambda samples: self.make_batch(source.read(samples))


def build_user_module(spec: ModuleSpec, *, seed: int = 0) -> UserModule:
    """Call the user's function; the same seed gives the same weights, the chance stays untouched.

    Every rank holds the whole of it in host memory once, before it is cut. What recomputation would
    make something else of is refused.
    """
    source = load_source(spec.path)
    module = build_whole(source, spec.function, spec.path, seed=seed)
    fed = choose_batch(module, source, spec.path, seed=seed)
    model = UserModule(module, spec.block_list, fed, seq_len=spec.seq_len)
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


def choose_batch(module: nn.Module, source: ModuleType, path: str, *, seed: int = 0) -> Fed:
    """What the module is fed: as its file says, or as its arguments tell."""
    weight = getattr(source, "training_weight", None)
    weight = weight if callable(weight) else None
    own = find_own_samples(source, path, seed=seed)
    if own is not None:
        return Fed(own.instead_of, own, weight)
    named = getattr(source, "training_batch", None)
    make_batch = named if callable(named) else _guessed_batch(module, path)
    return Fed(make_batch, weight=weight)


def _guessed_batch(module: nn.Module, path: str) -> MakeBatch:
    needed = [
        parameter.name
        for parameter in inspect.signature(module.forward).parameters.values()
        if parameter.kind in (parameter.POSITIONAL_ONLY, parameter.POSITIONAL_OR_KEYWORD)
    ]
    if {"input_ids", "labels"} <= set(needed):
        return _same_twice
    required = [
        parameter.name
        for parameter in inspect.signature(module.forward).parameters.values()
        if parameter.default is parameter.empty
        and parameter.kind is parameter.POSITIONAL_OR_KEYWORD
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
        hint="Add `def training_data()` to the file, which returns samples of its own, or train it "
        "with a script of your own: command: in docs/jobs.md",
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
    some = torch.randint(vocab_size, (_WEIGHED, short.shape[1]), generator=chance)
    check_weight(model, model.make_batch(some))
    if model.make_batch is _same_twice:
        _check_causal(model, short, vocab_size)


def _check_causal(model: UserModule, tokens: torch.Tensor, vocab_size: int) -> None:
    """Refuse a module that would be shown the tokens that it is to predict (BERT)."""
    other = tokens.clone()
    other[:, -2] = (other[:, -2] + 1) % vocab_size  # the last one that enters
    left = []
    with torch.no_grad(), torch.random.fork_rng(devices=[]):
        for some in (tokens, other):
            torch.manual_seed(_SEED)
            left.append(model.run_block(0, *model.embed(model.make_batch(some))))
    if not _are_close(left[1][:, :-1], left[0][:, :-1]):
        raise InvalidSpec(
            f"the first block of {type(model.module).__name__} sees tokens that come later, so it "
            "would be shown what it is to predict",
            hint="Say what is hidden and what is predicted. " + _HINT,
        )


def _same_twice(tokens: torch.Tensor) -> dict[str, Any]:
    inputs = tokens[:, :-1].contiguous()
    return {"input_ids": inputs, "labels": inputs}


def _tokens_and_following(tokens: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor]:
    return tokens[:, :-1].contiguous(), tokens[:, 1:].contiguous()
