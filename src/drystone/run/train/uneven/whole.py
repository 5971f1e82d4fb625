"""One training step with whole weights on every rank, micro-batch after micro-batch.

Theory of operation. Where memory allows, nothing is faster than the plain way: a rank holds all
weights, runs a micro-batch through all layers with one graph, and adds up gradients. They are
reduced once a step, each layer's as soon as the last micro-batch has passed it backward, while the
layers before it still compute. Every rank reduces in one order, however many micro-batches it has;
a rank with none takes part too.

The optimizer's state is either replicated, then every rank does the same update; or cut by the
ranks' shares, then each updates its piece and layers are gathered when the next step first uses
them (ZeRO-1, arXiv:1910.02054). What is recomputed in the backward pass is the plan's choice.
"""

from __future__ import annotations

from collections.abc import Sequence
from functools import partial

import torch

from drystone.describe.recipe import Recompute
from drystone.errors import InvalidSpec
from drystone.run.train.chance import Chance
from drystone.run.train.collectives import Pending, Wire
from drystone.run.train.emulate import Pacer
from drystone.run.train.models.layered import Batch, Extras, LayeredModel
from drystone.run.train.recompute import kind_of_block, recomputing
from drystone.run.train.stepping import Stepper, StepResult
from drystone.run.train.uneven.engine import lay_out
from drystone.run.train.uneven.shard import Layer


class WholeEngine(Stepper):
    """Holds a whole model on every rank and takes steps with it."""

    def __init__(
        self,
        model: LayeredModel,
        shares: Sequence[float],  # of the optimizer's state
        *,
        wire: Wire | None = None,
        device: torch.device | None = None,
        dtype: torch.dtype = torch.float32,
        is_replicated: bool = False,
        recompute: Recompute | None = None,
        seed: int = 0,
        pacer: Pacer | None = None,
    ) -> None:
        wire, device = wire or Wire(), device or torch.device("cpu")
        if len(shares) != wire.num_ranks:
            raise InvalidSpec(f"{len(shares)} state shares for {wire.num_ranks} ranks")
        layers = lay_out(
            model,
            shares,
            wire=wire,
            device=device,
            dtype=dtype,
            replicates_trained=is_replicated,
            replicates_frozen=True,  # nothing is ever exchanged of it
        )
        super().__init__(layers.owned, wire=wire, device=device, pacer=pacer)
        self.model = model
        self._chance = Chance(device, seed=seed, rank=wire.rank)
        self._front, self._blocks, self._back = layers.front, layers.blocks, layers.back
        kinds = [kind_of_block(recompute or Recompute(), at) for at in range(len(self._blocks))]
        self._runs = [
            recomputing(partial(self._run_block, at), kind) for at, kind in enumerate(kinds)
        ]
        backward = [*reversed(self._blocks), self._front]
        if self._back is not self._front:  # a shared one is whole at the very end
            backward.insert(0, self._back)
        self._reductions = _Reductions([layer for layer in backward if layer.is_trained], wire)

    def compute_gradients(self, batches: Sequence[Batch]) -> StepResult:
        """Forward and backward over this rank's micro-batches: each owned piece gets its `grad`."""
        self.timer.begin()
        total = self._start_total(sum(self.model.weight(batch) for batch in batches))
        loss_sum = torch.zeros((), dtype=torch.float64, device=self.device)
        self._reductions.begin()
        with self._chance.in_step(self.num_steps):
            for index, batch in enumerate(batches):
                loss, hidden = self._forward(index, batch)
                loss_sum += loss.detach()
                self._reductions.is_armed = index == len(batches) - 1
                num_layers = len(self._blocks)
                with (
                    self._timed("backward"),
                    self._paced("backward", hidden, num_layers=num_layers),
                ):
                    loss.backward(self._loss_gradient(loss, total))
                del loss, hidden
        for layer in self._in_order:  # where nothing was computed too: all ranks gather
            self._ready(layer)
        with self._timed("reduce"):
            self._reductions.finish()
        for layer in self._in_order:
            layer.leave()
        self.num_steps += 1
        return self._result(loss_sum, total)

    def compute_loss(self, batches: Sequence[Batch]) -> tuple[float, float]:
        """Losses summed over the micro-batches of all ranks, and their weight; no gradients."""
        self.timer.begin()
        loss_sum = torch.zeros((), dtype=torch.float64, device=self.device)
        self.model.module.eval()
        with torch.no_grad():
            for layer in self._in_order:
                self._ready(layer)
            for batch in batches:
                hidden, extras = self.model.embed(batch)
                for at in range(len(self._blocks)):
                    hidden = self.model.run_block(at, hidden, extras)
                loss_sum += self.model.loss_sum(hidden, batch)
        for layer in self._in_order:
            layer.leave()
        self.model.module.train()
        return self._summed(loss_sum, sum(self.model.weight(batch) for batch in batches))

    @property
    def _in_order(self) -> list[Layer]:
        """As they are used first."""
        behind = [] if self._back is self._front else [self._back]
        return [self._front, *self._blocks, *behind]

    def _ready(self, layer: Layer) -> None:
        """Its weights are there; the next one's are on their way."""
        if layer.is_gathered:
            return
        with self._timed("gather"):
            layer.gather()
        order = self._in_order
        at = order.index(layer) + 1
        if at < len(order):
            order[at].start_gather()

    def _forward(self, index: int, batch: Batch) -> tuple[torch.Tensor, torch.Tensor]:
        """The sum of losses with its graph, and what left the last block."""
        self._ready(self._front)
        with self._timed("forward"):
            self._chance.begin(-1, index)
            hidden, extras = self.model.embed(batch)
        for at, layer in enumerate(self._blocks):
            self._ready(layer)
            with self._timed("forward"), self._paced("forward", hidden):
                hidden = self._runs[at](index, hidden, extras)
        self._ready(self._back)
        with self._timed("forward"), self._paced("head", hidden):
            self._chance.begin(len(self._blocks), index)
            return self.model.loss_sum(hidden, batch), hidden.detach()

    def _run_block(self, at: int, index: int, hidden: torch.Tensor, extras: Extras) -> torch.Tensor:
        self._chance.begin(at, index)
        return self.model.run_block(at, hidden, extras)


class _Reductions:
    """Starts to reduce each layer's gradients when the last of them is there, in one order."""

    def __init__(self, layers: Sequence[Layer], wire: Wire) -> None:
        self._layers = list(layers)  # as the backward pass leaves them
        self.is_armed = False  # in the last micro-batch
        self._num_left = [0] * len(self._layers)
        self._next = 0
        self._pending: list[Pending] = []
        if wire.num_ranks > 1:
            for at, layer in enumerate(self._layers):
                for parameter in layer.trained_parameters():
                    parameter.register_post_accumulate_grad_hook(partial(self._count, at))

    def begin(self) -> None:
        """Before a step."""
        self.is_armed, self._next = False, 0
        self._num_left = [len(layer.trained_parameters()) for layer in self._layers]
        for layer in self._layers:
            layer.begin_gradients(is_late=True)

    def finish(self) -> None:
        """All of them, also of layers that nothing was computed with; until they are there."""
        self._num_left = [0] * len(self._layers)
        self._start_those_ready()
        while self._pending:
            self._pending.pop(0).wait()

    def _count(self, at: int, _: torch.Tensor) -> None:
        if self.is_armed:
            self._num_left[at] -= 1
            self._start_those_ready()

    def _start_those_ready(self) -> None:
        while self._next < len(self._layers) and self._num_left[self._next] <= 0:
            self._pending.append(self._layers[self._next].start_reduce())
            self._next += 1
