"""One training step of a job whose layers, matrices and batch are split, equal to one device's.

Theory of operation. Every rank walks through the order of the whole pipeline (`pipeline.py`):
it computes what is its stage's, and begins to receive where another stage computes what it needs.
What enters its layers comes from the ranks of the stage before, as much as each of them has of this
rank's samples and positions (`exchange.py`), so two stages need not be split alike; gradients go
back the same way. Within a stage matrices are split over tensor-parallel ranks (`tensor.py`), and
weights, gradients and optimizer state over data-parallel ranks (`stage.py`).

Losses are summed and divided by the tokens of the whole step; gradients are summed.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any

import torch

from drystone.describe.recipe import Recompute
from drystone.errors import InvalidSpec
from drystone.run.train.cells.build import TIED, CellBuilder, join_groups
from drystone.run.train.cells.exchange import Incoming, Mail, Region, TiedGradient, hidden_regions
from drystone.run.train.cells.layout import Action, CellLayout, pipeline_order
from drystone.run.train.cells.tensor import refuse_unsplittable
from drystone.run.train.collectives import Wire
from drystone.run.train.data import RankWork
from drystone.run.train.emulate import Pacer
from drystone.run.train.models.layered import Batch, LayeredModel
from drystone.run.train.models.transformer import Transformer
from drystone.run.train.samples import num_predicted
from drystone.run.train.stepping import Stepper, StepResult, Total
from drystone.run.train.trainer import Trainer


class CellEngine(Stepper):
    """Holds one rank's part of a reference transformer and takes steps with the other ranks."""

    def __init__(
        self,
        model: Transformer,  # without weights, on the meta device
        layout: CellLayout,
        *,
        seq_len: int,
        wire: Wire,
        device: torch.device | None = None,
        dtype: torch.dtype = torch.float32,
        recompute: Recompute | None = None,
        pacer: Pacer | None = None,
    ) -> None:
        if layout.num_ranks != wire.num_ranks:
            raise InvalidSpec(
                f"the plan is for {layout.num_ranks} ranks, {wire.num_ranks} were started"
            )
        for stage in layout.stages:
            refuse_unsplittable(model, stage.tp)
        self.layout, self.seat, self._seq_len = layout, layout.seat(wire.rank), seq_len
        self._dtype, self._width = dtype, model.spec.hidden_size
        self._is_packed = model.is_packed
        order = pipeline_order(
            layout.schedule,
            num_stages=len(layout.stages),
            num_chunks=len(layout.chunks),
            num_micro=layout.num_micro,
        )
        self._order = [
            action for action in order if self._is_mine(action) or self._is_mine(_next(action))
        ]
        device = device or torch.device("cpu")
        self._groups = join_groups(layout, self.seat, wire)
        builder = CellBuilder(
            model,
            layout,
            self.seat,
            self._groups,
            seq_len=seq_len,
            splits_sequence=self._splits_sequence(self.seat.stage),
            device=device,
            dtype=dtype,
            recompute=recompute or Recompute(),
        )
        self._parts, self._runs = builder.build(self._timed, self._paced)
        owned = [one for part in self._parts for one in part.owned]
        super().__init__(owned, wire=wire, device=device, pacer=pacer)
        is_tied = model.spec.tied_embeddings and len(layout.stages) > 1
        self._tied = self._tie() if is_tied else None
        self._total = Total(torch.ones(1, dtype=torch.float64, device=device))  # of a step
        self._losses = torch.zeros((), dtype=torch.float64, device=device)

    @property
    def reads_samples(self) -> bool:
        """Whether this rank needs tokens: to enter, to be predicted, or to keep documents apart."""
        chunks = self.layout.chunks
        return self._is_packed or self.seat.stage in (chunks[0].stage, chunks[-1].stage)

    def compute_gradients(self, batches: Sequence[Batch]) -> StepResult:
        """Forward and backward over all micro-batches: each owned piece gets its `grad`."""
        self.timer.begin()
        self._losses.zero_()
        self._total = self._count_predicted(batches)
        incoming: dict[Action, Incoming] = {}
        for action in self._order:
            if not self._is_mine(action):
                self._expect(_next(action), incoming)
                continue
            with self._timed("receive"):
                given = incoming.pop(action).wait() if action in incoming else None
            self._take(action, given, batches)
        for part in self._parts:
            part.end_step()
        with self._timed("reduce"):
            for part in self._parts:
                part.finish_reduction()
            self._groups.forward_mail.finish()
            self._groups.backward_mail.finish()
            if self._tied is not None:
                self._tied.add_other()
        self.num_steps += 1
        return self._result(self._losses, self._total)

    def compute_loss(self, batches: Sequence[Batch]) -> tuple[float, float]:
        """Losses summed over the samples of all ranks, and the tokens predicted; no gradients."""
        self.timer.begin()
        self._losses.zero_()
        total = self._count_predicted(batches)
        incoming: dict[Action, Incoming] = {}
        for action in self._order:
            if not action.is_forward:
                continue
            if not self._is_mine(action):
                self._expect(_next(action), incoming)
                continue
            given = incoming.pop(action).wait() if action in incoming else None
            self._take(action, given, batches)
            self._runs[action.chunk].forget(action.micro)
        for part in self._parts:
            part.end_step()
        self._groups.forward_mail.finish()
        (predicted,) = self.wire.read(total.value())
        return self._summed(self._losses, 0.0)[0], predicted

    def _count_predicted(self, batches: Sequence[Batch]) -> Total:
        """Over all ranks: each sample is counted by one rank of the last stage."""
        counts = self.seat.stage == self.layout.chunks[-1].stage and self.seat.tp_index == 0
        mine = sum(num_predicted(batch) for batch in batches) if counts else 0
        return self._start_total(mine)

    def _take(self, action: Action, given: torch.Tensor | None, batches: Sequence[Batch]) -> None:
        run, chunk = self._runs[action.chunk], action.chunk
        is_last = chunk == len(self.layout.chunks) - 1
        if action.is_forward:
            is_read = chunk == 0 or is_last or self._is_packed
            batch = batches[action.micro] if is_read else None
            hidden = run.forward(action.micro, given, batch)
            if not is_last:
                self._send(action, hidden)
            elif hidden is not None and self.seat.tp_index == 0:
                self._losses += hidden
        else:
            if is_last:
                given = self._loss_gradient(self._losses.float(), self._total)
            # Every order takes the micro-batches of a chunk backward from first to last.
            is_last_micro = action.micro == self.layout.num_micro - 1
            self._send(action, run.backward(action.micro, given, is_last=is_last_micro))

    def _expect(self, action: Action, incoming: dict[Action, Incoming]) -> None:
        """Begin to receive what an action of this stage needs."""
        mine = self._held(self.seat.stage, action.micro)[self.wire.rank]
        if not len(mine[0]):
            return
        shape = (len(mine[0]), len(mine[1]), self._width)
        tensor = torch.empty(shape, dtype=self._dtype, device=self.device)
        giver = self.layout.chunks[action.chunk + (-1 if action.is_forward else 1)].stage
        given = self._given(giver, action.micro)
        incoming[action] = self._mail(action).start_receive(tensor, mine, given)

    def _send(self, action: Action, tensor: torch.Tensor | None) -> None:
        """Give the result of an action to whoever goes on with it, if anybody does."""
        taker = _next(action).chunk
        if tensor is None or not 0 <= taker < len(self.layout.chunks):
            return
        self._mail(action).send(
            tensor,
            self._given(self.seat.stage, action.micro)[self.wire.rank],
            self._held(self.layout.chunks[taker].stage, action.micro),
            held=self._held(self.seat.stage, action.micro)[self.wire.rank],
        )

    def _is_mine(self, action: Action) -> bool:
        """Whether it is of this rank's stage, and of the pipeline at all."""
        chunks = self.layout.chunks
        return 0 <= action.chunk < len(chunks) and chunks[action.chunk].stage == self.seat.stage

    def _mail(self, action: Action) -> Mail:
        return self._groups.forward_mail if action.is_forward else self._groups.backward_mail

    def _held(self, stage: int, micro: int) -> Mapping[int, Region]:
        """Samples and positions that each rank of a stage computes with."""
        return self._regions(stage, micro, splits_sequence=self._splits_sequence(stage))

    def _given(self, stage: int, micro: int) -> Mapping[int, Region]:
        """Those that it gives away."""
        return self._regions(stage, micro, splits_sequence=True)

    def _regions(self, stage: int, micro: int, *, splits_sequence: bool) -> Mapping[int, Region]:
        return hidden_regions(
            self.layout.stages[stage],
            self.layout.num_samples(micro),
            self._seq_len,
            splits_sequence=splits_sequence,
        )

    def _splits_sequence(self, stage: int) -> bool:
        """Positions are split evenly or not at all."""
        tp = self.layout.stages[stage].tp
        return self.layout.splits_sequence and tp > 1 and self._seq_len % tp == 0

    def _tie(self) -> TiedGradient:
        first, last = (self.layout.chunks[at].stage for at in (0, -1))
        return TiedGradient(
            self.owned,
            TIED,
            wire=self.wire,
            stages=(self.layout.stages[first].ranks, self.layout.stages[last].ranks),
            mails=(self._groups.forward_mail, self._groups.backward_mail),
        )


def _next(action: Action) -> Action:
    """The action that goes on with the result; that of the last one is not in the pipeline."""
    return Action(action.is_forward, action.chunk + (1 if action.is_forward else -1), action.micro)


class CellTrainer(Trainer):
    """A reference transformer in the parts that a layout says; takes what `Trainer` takes."""

    def __init__(
        self,
        model: Transformer,
        layout: CellLayout,
        *,
        seq_len: int,
        recompute: Recompute | None = None,
        **settings: Any,
    ) -> None:
        self.layout, self._seq_len = layout, seq_len
        how = recompute or Recompute()
        super().__init__(model, layout_works(layout), recompute=how, **settings)

    @property
    def global_batch(self) -> int:
        """Samples in a step; several ranks work on each of them."""
        return self.layout.global_batch

    def rebalance(self, batches: Sequence[int], micro_batches: Sequence[int] | None = None) -> None:
        """Refused: stages and tensor-parallel ranks would have to move together."""
        _refuse_rebalancing()

    def _make_engine(
        self,
        model: LayeredModel,
        *,
        wire: Wire | None,
        device: torch.device,
        dtype: torch.dtype,
        offload: bool,
    ) -> Stepper:
        if self.config.rebalances:
            _refuse_rebalancing()
        if offload:
            raise InvalidSpec(
                "activations cannot be offloaded where layers or matrices are split",
                hint="Plan with recomputation, or with data parallelism alone",
            )
        assert isinstance(model, Transformer)
        return CellEngine(
            model,
            self.layout,
            seq_len=self._seq_len,
            wire=wire or Wire(),
            device=device,
            dtype=dtype,
            recompute=self._recompute,
            pacer=self._pacer,
        )

    def _runs(self, position: int) -> list[range]:
        assert isinstance(self.engine, CellEngine)
        if not self.engine.reads_samples:
            return []
        return self.layout.samples(self.engine.seat, position)


def layout_works(layout: CellLayout) -> list[RankWork]:
    """What every rank computes in a step; ranks that split matrices share their samples."""
    works = []
    for rank in range(layout.num_ranks):
        seat = layout.seat(rank)
        stage = layout.stages[seat.stage]
        works.append(
            RankWork(
                batch=sum(len(run) for run in layout.samples(seat, 0)),
                micro_batch=max(1, stage.samples[seat.dp_index]),
                state_share=stage.shares[seat.dp_index],
            )
        )
    return works


def _refuse_rebalancing() -> None:
    raise InvalidSpec(
        "samples cannot be moved between ranks where layers or matrices are split",
        hint="Leave out --rebalance, or plan with data parallelism alone",
    )
