"""Split the matrices of the reference transformer over tensor-parallel ranks, by DTensor.

Queries, keys, values and the first feed-forward matrices are split by columns, the others by rows,
embedding and head by the vocabulary, and the loss is computed over the split vocabulary. With the
sequence split, what is between (norms, residual stream) exists once over all ranks; else each rank
has all of it.

The weights themselves stay plain tensors (`Leaf.value`), this rank's part of each, so that what
shards and optimizes them need not know; a hook makes them DTensors when a module is called.
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from dataclasses import dataclass, replace
from typing import Any

import torch
import torch.distributed as dist
from torch import nn
from torch.distributed.device_mesh import DeviceMesh
from torch.distributed.tensor import (
    DTensor,
    Partial,
    Placement,
    Replicate,
    Shard,
    distribute_tensor,
)
from torch.distributed.tensor.parallel import (
    ColwiseParallel,
    ParallelStyle,
    PrepareModuleInput,
    RowwiseParallel,
    parallelize_module,
)
from torch.nn import functional as F  # noqa: N812  # torch's own custom

from drystone.describe.model import ModelSpec, QkNorm
from drystone.errors import InvalidSpec
from drystone.run.train.checkpoint.slices import Box
from drystone.run.train.models.transformer import DecoderBlock, Transformer


@dataclass(frozen=True, slots=True, eq=False)
class Leaf:
    """What this rank has of one parameter, not yet filled."""

    name: str  # in the whole model
    shape: torch.Size  # of the whole
    part: Box  # where in the whole
    value: nn.Parameter  # of the shape of the part
    is_split: bool = False  # tensor-parallel ranks hold different parts; else each holds the whole
    is_partial: bool = False  # its gradient must be summed over the tensor-parallel ranks


def check_splittable(spec: ModelSpec, tp: int) -> list[str]:
    """Why the model cannot be split over that many tensor-parallel ranks; empty if it can."""
    problems = []
    for block in spec.blocks:
        attention = block.attention
        if block.is_moe:
            problems.append("experts are not split")
        if attention.num_heads % tp or (
            attention.num_kv_heads % tp and tp % attention.num_kv_heads
        ):
            problems.append(
                f"{attention.num_heads} heads over {attention.num_kv_heads} for keys and values "
                f"do not divide by {tp}"
            )
        if attention.qk_norm is QkNorm.FULL and attention.num_kv_heads % tp:
            problems.append(
                f"keys are normalised over all {attention.num_kv_heads} heads, which do not "
                f"divide by {tp}"
            )
    return list(dict.fromkeys(problems))


class TensorSplit:
    """How one group of tensor-parallel ranks splits what it computes; one rank splits nothing."""

    def __init__(self, mesh: DeviceMesh | None, *, splits_sequence: bool) -> None:
        self.mesh = mesh
        self.splits_sequence = splits_sequence and mesh is not None
        self._between: Placement = Shard(1) if self.splits_sequence else Replicate()

    def split_block(self, block: DecoderBlock, name: str) -> list[Leaf]:
        """The leaves of one layer; the module computes with them from now on."""
        if self.mesh is None:
            return list(_plain_leaves(block, name))
        plan: dict[str, ParallelStyle] = {
            "attention": self._gathered(num_others=1),
            "attention.query": ColwiseParallel(),
            "attention.out": RowwiseParallel(output_layouts=self._between),
            "feed_forward": self._gathered(),
            "feed_forward.up": ColwiseParallel(),
            "feed_forward.down": RowwiseParallel(output_layouts=self._between),
        }
        if block.feed_forward.gate is not None:
            plan["feed_forward.gate"] = ColwiseParallel()
        attention, tp = block.attention, self.mesh.size()
        spec = attention.spec
        if spec.num_kv_heads % tp == 0:
            plan |= {"attention.key": ColwiseParallel(), "attention.value": ColwiseParallel()}
        is_full = spec.qk_norm is QkNorm.FULL
        if is_full:
            plan |= {"attention.query_norm": _SplitNorm(), "attention.key_norm": _SplitNorm()}
        parallelize_module(block, self.mesh, plan)
        partial = [] if is_full else ["query_norm", "key_norm"]
        if self.splits_sequence:
            partial.append("norms")
        if spec.num_kv_heads % tp:
            partial += ["key", "value"]
            head = self.mesh.get_local_rank() * spec.num_kv_heads // tp
            _use_one_head(attention.key, head, spec.head_dim)
            _use_one_head(attention.value, head, spec.v_dim)
        attention.spec = replace(
            spec, num_heads=spec.num_heads // tp, num_kv_heads=max(1, spec.num_kv_heads // tp)
        )
        return list(self._leaves(block, name, partial))

    def split_front(self, model: Transformer) -> list[Leaf]:
        """The leaves of what is before the layers."""
        leaves: list[Leaf] = []
        for name in ("tokens", "positions", "first_norm"):
            module = getattr(model, name)
            if name == "tokens" and self.mesh is not None:
                style = RowwiseParallel(input_layouts=Replicate(), output_layouts=Replicate())
                parallelize_module(module, self.mesh, style)
            if module is not None:
                leaves += self._leaves(module, name, ())
        if self.mesh is not None:
            _look_up_part(model.tokens, leaves[0].part, self.mesh)
        return leaves

    def split_back(self, model: Transformer, *, tied: str, shared: Leaf | None) -> list[Leaf]:
        """The leaves of what is after the layers.

        Where the head's weight is another parameter's, `tied` names that, and `shared` is its leaf
        if this rank has it; it is not returned again.
        """
        leaves: list[Leaf] = []
        if model.final_norm is not None:
            partial = ("",) if self.splits_sequence else ()
            leaves += self._leaves(model.final_norm, "final_norm", partial)
        if self.mesh is not None:
            style = ColwiseParallel(
                input_layouts=self._between, output_layouts=Shard(-1), use_local_output=False
            )
            parallelize_module(model.head, self.mesh, style)
        names = {"weight": tied} if tied else {}
        leaves += self._leaves(model.head, "head", (), names=names, shared=shared)
        return leaves

    def enter(self, hidden: torch.Tensor) -> torch.Tensor:
        """Of embedded tokens, which each rank has all of, the positions of this one."""
        if not self.splits_sequence or self.mesh is None:
            return hidden
        whole = DTensor.from_local(hidden, self.mesh, [Replicate()], run_check=False)
        return whole.redistribute(placements=[Shard(1)]).to_local()

    def _gathered(self, num_others: int = 0) -> PrepareModuleInput:
        others: tuple[Any, ...] = (None,) * num_others
        return PrepareModuleInput(
            input_layouts=(self._between, *others),
            desired_input_layouts=(Replicate(), *others),
        )

    def _leaves(
        self,
        module: nn.Module,
        name: str,
        partial: tuple[str, ...] | list[str],
        *,
        names: dict[str, str] | None = None,
        shared: Leaf | None = None,
    ) -> Iterator[Leaf]:
        """Take the parameters out of the modules; where they are DTensors, hooks bring them back.

        Parts of the module whose name is in `partial` see a part of the work only.
        """
        if self.mesh is None and not names:
            yield from _plain_leaves(module, name)
            return
        for path, part in module.named_modules():
            split: dict[str, tuple[Leaf, DTensor | None]] = {}
            for key, parameter in list(part.named_parameters(recurse=False)):
                inner = f"{path}.{key}".lstrip(".")
                full = (names or {}).get(key) or f"{name}.{inner}"
                is_partial = any(one in ("", *path.split(".")) for one in partial)
                if shared is not None and shared.name == full:
                    leaf = shared
                else:
                    leaf = self._leaf(full, parameter, is_partial=is_partial)
                    yield leaf
                setattr(part, key, leaf.value)
                if isinstance(parameter, DTensor):
                    split[key] = (leaf, parameter)
            if split:
                _bring_back(part, split)

    def _leaf(self, name: str, parameter: nn.Parameter, *, is_partial: bool) -> Leaf:
        if not isinstance(parameter, DTensor):
            return _plain_leaf(name, parameter, is_partial=is_partial)
        assert self.mesh is not None
        offsets, lengths = [0] * parameter.dim(), list(parameter.shape)
        placement = parameter.placements[0]
        if isinstance(placement, Shard):
            each = -(-lengths[placement.dim] // self.mesh.size())
            start = min(each * self.mesh.get_local_rank(), lengths[placement.dim])
            offsets[placement.dim] = start
            lengths[placement.dim] = min(each, lengths[placement.dim] - start)
        return Leaf(
            name=name,
            shape=parameter.shape,
            part=Box(tuple(offsets), tuple(lengths), 0),
            value=_unfilled(lengths, requires_grad=parameter.requires_grad),
            is_split=isinstance(placement, Shard),
        )


def _plain_leaves(module: nn.Module, name: str) -> Iterator[Leaf]:
    for path, part in module.named_modules():
        for key, parameter in list(part.named_parameters(recurse=False)):
            leaf = _plain_leaf(f"{name}.{path}.{key}".replace("..", "."), parameter)
            setattr(part, key, leaf.value)
            yield leaf


def _plain_leaf(name: str, parameter: nn.Parameter, *, is_partial: bool = False) -> Leaf:
    shape = parameter.shape
    value = _unfilled(shape, requires_grad=parameter.requires_grad, dtype=parameter.dtype)
    whole = Box((0,) * len(shape), tuple(shape), 0)
    return Leaf(name=name, shape=shape, part=whole, value=value, is_partial=is_partial)


def _unfilled(
    shape: Sequence[int], *, requires_grad: bool, dtype: torch.dtype = torch.float32
) -> nn.Parameter:
    """A parameter of that shape that takes no memory."""
    empty = torch.empty((), dtype=dtype).expand(tuple(shape))
    return nn.Parameter(empty, requires_grad=requires_grad)


def _bring_back(module: nn.Module, leaves: dict[str, tuple[Leaf, DTensor]]) -> None:
    """When the module is called, its parameters are DTensors made of the leaves."""
    for key in leaves:
        delattr(module, key)

    def install(called: nn.Module, _: Any) -> None:
        for key, (leaf, like) in leaves.items():
            called.__dict__[key] = DTensor.from_local(
                leaf.value,
                like.device_mesh,
                like.placements,
                run_check=False,
                shape=like.shape,
                stride=like.stride(),
            )

    def remove(called: nn.Module, _: Any, __: Any) -> None:
        for key in leaves:
            called.__dict__.pop(key, None)

    module.register_forward_pre_hook(install, prepend=True)
    module.register_forward_hook(remove)


class _SplitNorm(ParallelStyle):
    """A norm over channels of which each rank has some: its weight is split as they are."""

    def _apply(self, module: nn.Module, device_mesh: DeviceMesh) -> nn.Module:
        assert isinstance(module, nn.RMSNorm)
        whole = module.weight
        split = distribute_tensor(whole, device_mesh, [Shard(0)])
        module.weight = nn.Parameter(split, requires_grad=whole.requires_grad)
        channels, eps, group = whole.numel(), module.eps, device_mesh.get_group()

        def normed(x: torch.Tensor) -> torch.Tensor:
            weight: DTensor = module.weight
            own = x.float()
            squares = _summed(own.square().sum(-1, keepdim=True), group)
            own = own * torch.rsqrt(squares / channels + eps)
            return own.to(x.dtype) * weight.to_local()

        module.forward = normed
        return module


def _summed(x: torch.Tensor, group: dist.ProcessGroup) -> torch.Tensor:
    """The sum over the ranks of a group; each rank uses it, so gradients are summed too."""
    total: torch.Tensor = _Summed.apply(x, group)
    return total


class _Summed(torch.autograd.Function):
    @staticmethod
    def forward(ctx: Any, x: torch.Tensor, group: dist.ProcessGroup) -> torch.Tensor:
        ctx.group = group
        total = x.clone()
        dist.all_reduce(total, group=group)
        return total

    @staticmethod
    def backward(ctx: Any, gradient: torch.Tensor) -> tuple[torch.Tensor, None]:
        total = gradient.clone()
        dist.all_reduce(total, group=ctx.group)
        return total, None


def _look_up_part(module: nn.Embedding, part: Box, mesh: DeviceMesh) -> None:
    """Each rank looks up the tokens that it has; the sum over the ranks is all of them.

    So does DTensor, but in the backward pass it makes the gradient of the whole vocabulary.
    """
    first, num_tokens = part.offsets[0], part.lengths[0]
    padding = None if module.padding_idx is None else module.padding_idx - first
    if padding is not None and not 0 <= padding < num_tokens:
        padding = None  # another rank has it

    def look_up(tokens: DTensor) -> DTensor:
        weight: DTensor = module.weight
        at = tokens.to_local() - first
        is_elsewhere = (at < 0) | (at >= num_tokens)
        found = F.embedding(at.masked_fill(is_elsewhere, 0), weight.to_local(), padding)
        found = found.masked_fill(is_elsewhere.unsqueeze(-1), 0.0)
        return DTensor.from_local(found, mesh, [Partial()], run_check=False)

    module.forward = look_up


def _use_one_head(module: nn.Linear, head: int, size: int) -> None:
    """More ranks than heads of keys and values: each computes all of them, and uses one."""

    def localise(_: nn.Module, inputs: tuple[Any, ...]) -> tuple[Any, ...]:
        return (inputs[0].to_local(grad_placements=[Partial()]),)

    def choose(_: nn.Module, __: Any, out: torch.Tensor) -> torch.Tensor:
        return out[..., head * size : (head + 1) * size]

    module.register_forward_pre_hook(localise)
    module.register_forward_hook(choose)


def refuse_unsplittable(model: Transformer, tp: int) -> None:
    """An error that says why the model cannot be split so."""
    if tp == 1:
        return
    problems = check_splittable(model.spec, tp)
    if not all(parameter.requires_grad for parameter in model.parameters()):
        problems.append("adapters are not split")
    if problems:
        raise InvalidSpec(
            f"{model.spec.name} cannot be split over {tp} ranks: {'; '.join(problems)}"
        )
