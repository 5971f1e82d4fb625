"""One training step over unequal ranks, layer by layer, equal to that of one device.

Theory of operation. The order of loops is swapped: every micro-batch passes a layer before the next
layer is gathered (layer-major accumulation, Cephalo, arXiv:2411.01075). A layer is gathered once in
the forward pass and once in the backward pass, and its gradient is reduced once, so the collectives
of a step are the same on every rank, however many micro-batches it has; a rank with none takes part
too. Only what enters a layer is kept; the backward pass computes the layer again from it.

Losses are summed, divided by what counts over all ranks, and gradients are summed, so a rank weighs
as much as its samples. The next layer is gathered while this one is computed.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

import torch
from torch import nn

from drystone.errors import InvalidSpec
from drystone.run.train.chance import Chance
from drystone.run.train.collectives import Pending, Wire
from drystone.run.train.device import Shelf, Shelved, is_accelerator
from drystone.run.train.emulate import Pacer, active_ledger
from drystone.run.train.models.layered import (
    Batch,
    Extras,
    LayeredModel,
    NamedBlocks,
    place_parameters,
)
from drystone.run.train.stepping import Stepper, StepResult, Total
from drystone.run.train.uneven.cuts import cut_units, unit_size
from drystone.run.train.uneven.shard import (
    InitialValue,
    Kind,
    Layer,
    Owned,
    Unit,
    kind_of,
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
    replicates_trained: bool = False,
    replicates_frozen: bool = False,
) -> Layers:
    """Cut a model by the ranks' shares of state; trained and frozen parameters each by them.

    What is replicated is not cut at all: every rank holds the whole of it.
    """
    if isinstance(model, NamedBlocks):
        model.dtype = dtype
    for buffer in model.module.buffers():
        buffer.data = buffer.data.to(device)
    initial_value = _initial_values(model, wire, device)
    groups = _group_parameters(model)
    units: list[list[Unit]] = [[] for _ in groups]
    for kind in Kind:
        is_replicated = replicates_trained if kind is Kind.TRAINED else replicates_frozen
        parts: dict[int, Named] = {}
        for index, (_, parameters) in enumerate(groups):
            some = [named for named in parameters if kind_of(named[1]) is kind]
            if some or (kind is Kind.TRAINED and not parameters):
                parts[index] = some
        sizes = [unit_size(one for _, one in some) for some in parts.values()]
        cuts = cut_units(sizes, (1.0,) if is_replicated else shares) if sizes else []
        for (index, some), cut in zip(parts.items(), cuts, strict=True):
            name = groups[index][0]
            unit = Unit(
                name if kind is Kind.TRAINED else f"{name}, {kind.value}",
                some,
                cut,
                wire=wire,
                device=device,
                dtype=dtype,
                initial_value=initial_value,
                is_replicated=is_replicated,
            )
            units[index].append(unit)
    layers = [Layer(some) for some in units]
    num_blocks = len(model.blocks)
    return Layers(tuple(layers[:num_blocks]), layers[num_blocks], layers[-1])


def _initial_values(model: LayeredModel, wire: Wire, device: torch.device) -> InitialValue:
    """Weights that the model has, as rank 0 has them; or, on meta, those it says it begins with."""
    if not any(parameter.is_meta for parameter in model.module.parameters()):
        return value_of_rank_0(wire, device)
    make, make_part = (getattr(model, f"initial_{what}", None) for what in ("value", "part"))
    if make is None:
        raise InvalidSpec(
            f"{type(model.module).__name__} is on the meta device and does not say what its "
            "weights begin with",
            hint="Give it a method initial_value(name, parameter), or build it on the CPU",
        )
    place_parameters(
        model.module,
        lambda _, one: torch.empty((), dtype=one.dtype, device=device).expand(one.shape),
    )

    def elements(name: str, parameter: nn.Parameter, first: int, last: int) -> torch.Tensor:
        if make_part is not None:
            part: torch.Tensor = make_part(name, parameter.shape, first, last)
            return part
        whole: torch.Tensor = make(name, parameter)
        return whole.reshape(-1)[first:last]

    return elements


def _group_parameters(model: LayeredModel) -> list[tuple[str, Named]]:
    names = {id(one): name for name, one in model.module.named_parameters()}
    groups = [(f"block {i}", list(one.parameters())) for i, one in enumerate(model.blocks)]
    front, back = list(model.front), list(model.back)
    if {id(one) for one in front} & {id(one) for one in back}:
        groups.append(("around", list({id(one): one for one in (*front, *back)}.values())))
    else:
        groups += [("front", front), ("back", back)]
    placed = [id(parameter) for _, parameters in groups for parameter in parameters]
    if len(placed) != len(set(placed)) or set(placed) != set(names):
        missing = [name for key, name in names.items() if key not in set(placed)]
        raise InvalidSpec(
            "every parameter must belong to one block, or to what is before or after them",
            hint=f"Not placed: {missing[:5]}" if missing else "Some are shared by blocks",
        )
    return [(name, [(names[id(p)], p) for p in group]) for name, group in groups]


class Engine(Stepper):
    """Holds a model in unequal pieces and takes steps with it."""

    def __init__(
        self,
        model: LayeredModel,
        shares: Sequence[float],
        *,
        wire: Wire | None = None,
        device: torch.device | None = None,
        dtype: torch.dtype = torch.float32,
        offload: bool = False,
        seed: int = 0,
        pacer: Pacer | None = None,
    ) -> None:
        wire, device = wire or Wire(), device or torch.device("cpu")
        if len(shares) != wire.num_ranks:
            raise InvalidSpec(f"{len(shares)} state shares for {wire.num_ranks} ranks")
        layers = lay_out(model, shares, wire=wire, device=device, dtype=dtype)
        super().__init__(layers.owned, wire=wire, device=device, pacer=pacer)
        self.model = model
        self._chance = Chance(device, seed=seed, rank=wire.rank)
        # On a processor only where its memory plays that of a device: `host_memory` is another.
        is_host = offload and (is_accelerator(device) or active_ledger() is not None)
        self._shelf = Shelf(device, is_host=is_host)
        self.offloads = offload
        self._blocks, self._front, self._back = layers.blocks, layers.front, layers.back
        self._reduction: Pending | None = None

    def compute_gradients(self, batches: Sequence[Batch]) -> StepResult:
        """Forward and backward over this rank's micro-batches: each owned piece gets its `grad`."""
        self.timer.begin()
        total = self._start_total(sum(self.model.weight(batch) for batch in batches))
        self._order = self._gather_order()
        with self._chance.in_step(self.num_steps):
            hidden, extras, kept = self._forward(batches)
            loss, gradients = self._head(batches, hidden, total)
            self._backward(batches, gradients, extras, kept)
        self._shelf.finish()
        self._finish_reduction()
        self.num_steps += 1
        return self._result(loss, total)

    def compute_loss(self, batches: Sequence[Batch]) -> tuple[float, float]:
        """Losses summed over the micro-batches of all ranks, and their weight; no gradients."""
        self.timer.begin()
        self._order = [self._front, *self._blocks, self._back]
        loss_sum = torch.zeros((), dtype=torch.float64, device=self.device)
        self.model.module.eval()
        with torch.no_grad():
            unit = self._gather_next()
            entered = [self.model.embed(batch) for batch in batches]
            unit.free()
            for layer in range(len(self._blocks)):
                unit = self._gather_next()
                entered = [
                    (self.model.run_block(layer, hidden, extras), extras)
                    for hidden, extras in entered
                ]
                unit.free()
            unit = self._gather_next()
            for batch, (hidden, _) in zip(batches, entered, strict=True):
                loss_sum += self.model.loss_sum(hidden, batch)
            unit.free()
        self.model.module.train()
        return self._summed(loss_sum, sum(self.model.weight(batch) for batch in batches))

    def _gather_order(self) -> list[Layer]:
        """Layers in the order in which they are gathered; the last block stays for its backward."""
        again = [self._front] if self._front.is_trained else []
        return [
            self._front,
            *self._blocks,
            self._back,
            *reversed(self._blocks[:-1]),
            *again,
        ]

    def _gather_next(self) -> Layer:
        """The next layer of the order, ready; the one after it is on its way."""
        with self._timed("gather"):
            unit = self._order.pop(0)
            unit.gather()
        if self._order and not self._order[0].is_gathered:
            self._order[0].start_gather()
        return unit

    def _forward(
        self, batches: Sequence[Batch]
    ) -> tuple[list[Shelved], list[Extras], list[list[Shelved]]]:
        """Through front and blocks without a graph; what enters each block is kept."""
        unit = self._gather_next()
        hidden: list[Shelved] = []
        extras: list[Extras] = []
        kept: list[list[Shelved]] = []
        is_only = len(batches) == 1
        with torch.no_grad():
            with self._timed("forward"):
                for index, batch in enumerate(batches):
                    self._chance.begin(-1, index)
                    one, more = self.model.embed(batch)
                    hidden.append(self._shelf.put(one, is_next=is_only))
                    del one
                    extras.append(more)
            unit.free()
            for layer in range(len(self._blocks)):
                unit = self._gather_next()
                with self._timed("forward"):
                    kept.append(list(hidden))
                    for index, more in enumerate(extras):
                        entered = _take(hidden, index)
                        with self._paced("forward", entered):
                            left = self._run_block(layer, index, entered, more)
                        hidden[index] = self._shelf.put(left, is_next=is_only)
                        del entered, left
                if layer < len(self._blocks) - 1:
                    unit.free()
        return hidden, extras, kept

    def _head(
        self, batches: Sequence[Batch], hidden: list[Shelved], total: Total
    ) -> tuple[torch.Tensor, list[Shelved]]:
        """Losses, and their gradients with respect to what left the last block."""
        unit = self._gather_next()
        unit.begin_gradients()
        loss_sum = torch.zeros((), dtype=torch.float64, device=self.device)
        with self._timed("backward"):
            for index, batch in enumerate(batches):
                entered = _take(hidden, index).detach().requires_grad_()
                with self._paced("head", entered):
                    self._chance.begin(len(self._blocks), index)
                    loss = self.model.loss_sum(entered, batch)
                    loss_sum += loss.detach()
                    loss.backward(self._loss_gradient(loss, total))
                hidden[index] = self._put_gradient(entered, batches)  # the other is freed
                del entered, loss
        unit.free()
        if unit is not self._front:
            self._start_reduction(unit)
        return loss_sum, hidden

    def _backward(
        self,
        batches: Sequence[Batch],
        gradients: list[Shelved],
        extras: list[Extras],
        kept: list[list[Shelved]],
    ) -> None:
        """Back through the blocks, each computed again, then through the front."""
        for layer in reversed(range(len(self._blocks))):
            unit = self._blocks[layer]
            if not unit.is_gathered:
                unit = self._gather_next()
            unit.begin_gradients()
            entering = kept.pop()
            with self._timed("backward"):
                for index in range(len(batches)):
                    entered = _take(entering, index, kept).detach().requires_grad_()
                    with self._paced("backward", entered):
                        left = self._run_block(layer, index, entered, extras[index])
                        left.backward(_take(gradients, index))
                    gradients[index] = self._put_gradient(entered, batches)
                    del entered, left
            unit.free()
            self._start_reduction(unit)
        if self._front.is_trained:
            self._front_backward(batches, gradients)

    def _front_backward(self, batches: Sequence[Batch], gradients: list[Shelved]) -> None:
        """Embeddings, computed again; what is frozen needs no gradient."""
        unit = self._gather_next()
        if unit is not self._back:
            unit.begin_gradients()
        with self._timed("backward"):
            for index, batch in enumerate(batches):
                self._chance.begin(-1, index)
                hidden, _ = self.model.embed(batch)
                if hidden.requires_grad:
                    hidden.backward(_take(gradients, index))
        unit.free()
        self._start_reduction(unit)

    def _run_block(
        self, layer: int, index: int, hidden: torch.Tensor, extras: Extras
    ) -> torch.Tensor:
        self._chance.begin(layer, index)
        return self.model.run_block(layer, hidden, extras)

    def _start_reduction(self, unit: Layer) -> None:
        """One reduction is on its way at a time: the one before must have arrived."""
        self._finish_reduction()
        self._reduction = unit.start_reduce()

    def _finish_reduction(self) -> None:
        with self._timed("reduce"):
            if self._reduction is not None:
                self._reduction.wait()
        self._reduction = None

    def _put_gradient(self, entered: torch.Tensor, batches: Sequence[Batch]) -> Shelved:
        """The gradient of what entered; the only one of a step is used next, and stays."""
        gradient = entered.grad
        assert gradient is not None
        return Shelved(gradient) if len(batches) == 1 else self._shelf.put(gradient)


def _take(some: list[Shelved], index: int, later: Sequence[list[Shelved]] = ()) -> torch.Tensor:
    """One of them; the next one is on its way, after the last the first of the layer before."""
    some[index].start()
    if index + 1 < len(some):
        some[index + 1].start()
    elif later:
        later[-1][0].start()
    return some[index].get()
