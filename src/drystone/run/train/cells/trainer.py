"""Training of a job whose layers or matrices are split: the same trainer, another engine."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import torch

from drystone.describe.recipe import Recompute
from drystone.errors import InvalidSpec
from drystone.run.train.cells.engine import CellEngine
from drystone.run.train.cells.layout import CellLayout
from drystone.run.train.collectives import Wire
from drystone.run.train.data.batch import RankWork
from drystone.run.train.models.layered import LayeredModel
from drystone.run.train.models.transformer import Transformer
from drystone.run.train.stepping import Stepper
from drystone.run.train.trainer import Trainer


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
        self.layout, self._seq_len, self._recompute = layout, seq_len, recompute
        if settings.get("rebalances"):
            _refuse_rebalancing()
        if settings.get("offload"):
            raise InvalidSpec(
                "activations cannot be offloaded where layers or matrices are split",
                hint="Plan with recomputation, or with data parallelism alone",
            )
        super().__init__(model, layout_works(layout), **settings)

    @property
    def global_batch(self) -> int:
        """Samples in a step; several ranks work on each of them."""
        return self.layout.global_batch

    def rebalance(self, batches: Sequence[int]) -> None:
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
        seed: int,
    ) -> Stepper:
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

    def _runs(self) -> list[range]:
        assert isinstance(self.engine, CellEngine)
        if not self.engine.reads_samples:
            return []
        return self.layout.samples(self.engine.seat, self.progress.position)


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
