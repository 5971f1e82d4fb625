"""Which parameters are gathered together, and who holds what of them?

A block is a layer, and so is what stands before the blocks and what stands after them; where these
two share weights they are one layer. Within a layer trained and frozen parameters lie apart, so
that nothing is reduced, and no state kept, for the frozen ones.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

import torch
from torch import nn

from drystone.errors import InvalidSpec
from drystone.run.train.collectives import Wire
from drystone.run.train.models.layered import LayeredModel, place_parameters
from drystone.run.train.uneven.shard import (
    InitialValue,
    Layer,
    Owned,
    Unit,
    cut_units,
    value_of_rank_0,
)

Named = list[tuple[str, nn.Parameter]]


@dataclass(frozen=True, slots=True)
class Layers:
    """A whole model in pieces."""

    blocks: tuple[Layer, ...]
    front: Layer
    back: Layer  # the front itself, where weights are shared

    @property
    def owned(self) -> list[Owned]:
        """Every piece of a parameter that this rank holds."""
        around = (self.front,) if self.back is self.front else (self.front, self.back)
        layers = (*self.blocks, *around)
        return [one for layer in layers for unit in layer.units for one in unit.owned]


def lay_out(
    model: LayeredModel,
    shares: Sequence[float],
    *,
    wire: Wire,
    device: torch.device,
    dtype: torch.dtype,
) -> Layers:
    """Cut a model by the ranks' shares of state; trained and frozen parameters each by them."""
    for buffer in model.module.buffers():
        buffer.data = buffer.data.to(device)
    initial_value = _initial_values(model, wire, device)
    groups = _group_parameters(model)
    parts: list[tuple[int, str, Named]] = []
    for is_trained in (True, False):
        for index, (name, parameters) in enumerate(groups):
            some = [one for one in parameters if one[1].requires_grad is is_trained]
            if some or (is_trained and not parameters):
                parts.append((index, name if is_trained else f"{name}, frozen", some))
    cuts = _cut(parts, shares)
    units: list[list[Unit]] = [[] for _ in groups]
    for (index, name, parameters), cut in zip(parts, cuts, strict=True):
        unit = Unit(
            name, parameters, cut,
            wire=wire, device=device, dtype=dtype, initial_value=initial_value,
        )  # fmt: skip
        units[index].append(unit)
    layers = [Layer(some) for some in units]
    num_blocks = len(model.blocks)
    return Layers(tuple(layers[:num_blocks]), layers[num_blocks], layers[-1])


def _cut(parts: Sequence[tuple[int, str, Named]], shares: Sequence[float]) -> list[tuple[int, ...]]:
    """Trained units come first, then the frozen ones; each kind is divided by the shares."""
    sizes = [sum(one.numel() for _, one in parameters) for _, _, parameters in parts]
    num_trained = sum(not name.endswith(", frozen") for _, name, _ in parts)
    cuts = cut_units(sizes[:num_trained], shares) if num_trained else []
    return cuts + (cut_units(sizes[num_trained:], shares) if num_trained < len(sizes) else [])


def _initial_values(model: LayeredModel, wire: Wire, device: torch.device) -> InitialValue:
    """Weights that the model has, as rank 0 has them; or, on meta, those it says it begins with."""
    if not any(one.is_meta for one in model.module.parameters()):
        return value_of_rank_0(wire, device)
    make: InitialValue | None = getattr(model, "initial_value", None)
    if make is None:
        raise InvalidSpec(
            f"{type(model.module).__name__} is on the meta device and does not say what its "
            "weights begin with",
            hint="Give it a method initial_value(name, parameter), or build it on the CPU",
        )
    place_parameters(model.module, lambda _, one: torch.empty((), device=device).expand(one.shape))
    return make


def _group_parameters(model: LayeredModel) -> list[tuple[str, Named]]:
    names = {id(one): name for name, one in model.module.named_parameters()}
    groups = [(f"block {i}", list(one.parameters())) for i, one in enumerate(model.blocks)]
    front, back = list(model.front), list(model.back)
    if {id(one) for one in front} & {id(one) for one in back}:
        groups.append(("around", list({id(one): one for one in (*front, *back)}.values())))
    else:
        groups += [("front", front), ("back", back)]
    placed = [id(one) for _, parameters in groups for one in parameters]
    if len(placed) != len(set(placed)) or set(placed) != set(names):
        missing = [name for key, name in names.items() if key not in set(placed)]
        raise InvalidSpec(
            "every parameter must belong to one block, or to what is before or after them",
            hint=f"Not placed: {missing[:5]}" if missing else "Some are shared by blocks",
        )
    return [(name, [(names[id(p)], p) for p in group]) for name, group in groups]
