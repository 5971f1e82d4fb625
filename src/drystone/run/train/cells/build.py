"""One rank of a split job: the groups it is in, the weights it holds, the segments it computes."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from functools import partial

import torch
import torch.distributed as dist
from torch import nn
from torch.distributed.device_mesh import DeviceMesh

from drystone.describe.recipe import Recompute, RecomputeKind
from drystone.run.train.cells.exchange import Mail
from drystone.run.train.cells.layout import CellLayout, Chunk, Seat
from drystone.run.train.cells.stage import ChunkRun, Paced, Segment, StagePart, Timed, local_scalar
from drystone.run.train.cells.tensor import Leaf, TensorSplit
from drystone.run.train.collectives import Wire
from drystone.run.train.models.rotary import Rotary, rotary_tables
from drystone.run.train.models.transformer import Transformer
from drystone.run.train.recompute import kind_of_block, recomputing
from drystone.run.train.samples import Places, documents_of
from drystone.run.train.uneven.cuts import cut_units, unit_size
from drystone.run.train.uneven.shard import Kind, Unit, kind_of

TIED = "tokens.weight"  # what the head shares, where it shares something


@dataclass(frozen=True, slots=True, kw_only=True)
class CellGroups:
    """The ranks that one rank works with."""

    data: Wire  # the same part of the same layers
    tensor: dist.ProcessGroup | None  # the other parts of the same layers; None: there are none
    forward_mail: Mail
    backward_mail: Mail


def join_groups(layout: CellLayout, seat: Seat, wire: Wire) -> CellGroups:
    """Every rank makes all groups, in one order, and keeps its own."""
    tensor = None
    data: Wire | None = None
    for index, stage in enumerate(layout.stages):
        for tp_index in range(stage.tp):
            group = wire.make_group([stage.rank(one, tp_index) for one in range(stage.dp)])
            if (index, tp_index) == (seat.stage, seat.tp_index):
                data = Wire(group)
        for dp_index in range(stage.dp if stage.tp > 1 else 0):
            group = wire.make_group([stage.rank(dp_index, one) for one in range(stage.tp)])
            if (index, dp_index) == (seat.stage, seat.dp_index):
                tensor = group
    assert data is not None
    # Two of them: on NCCL the messages between two ranks share a stream within a group, and those
    # forward and those backward need not wait for each other.
    mails = [Mail(wire.make_group()) for _ in range(2)]
    return CellGroups(data=data, tensor=tensor, forward_mail=mails[0], backward_mail=mails[1])


class CellBuilder:
    """Takes a model without weights apart, and makes of it what one rank needs."""

    def __init__(
        self,
        model: Transformer,
        layout: CellLayout,
        seat: Seat,
        groups: CellGroups,
        *,
        seq_len: int,
        splits_sequence: bool,
        device: torch.device,
        dtype: torch.dtype,
        recompute: Recompute,
    ) -> None:
        self._model, self._layout, self._seat, self._groups = model, layout, seat, groups
        self._seq_len, self._device, self._dtype = seq_len, device, dtype
        self._recompute = recompute
        mesh = None
        if groups.tensor is not None:
            mesh = DeviceMesh.from_group(groups.tensor, device.type)
        self._split = TensorSplit(mesh, splits_sequence=splits_sequence)
        self._chunks = [chunk for chunk in layout.chunks if chunk.stage == seat.stage]
        self._rotary: Rotary = {}

    def build(self, timed: Timed, paced: Paced) -> tuple[list[StagePart], dict[int, ChunkRun]]:
        """The weights in their parts, and the chunks by number that run with them."""
        with torch.device(self._device):
            leaves = self._leaves()
        for buffer in self._model.buffers():
            buffer.data = buffer.data.to(self._device)
        units = self._units(leaves)
        parts = {name: self._part(name, units[name], some) for name, some in leaves.items()}
        runs = {
            self._layout.chunks.index(chunk): ChunkRun(
                list(self._segments(chunk, parts)), timed=timed, paced=paced
            )
            for chunk in self._chunks
        }
        return list(parts.values()), runs

    def _leaves(self) -> dict[str, list[Leaf]]:
        """The parameters of this rank by part; what two segments share makes them one part."""
        found: dict[str, list[Leaf]] = {}
        model, tied = self._model, TIED if self._model.spec.tied_embeddings else ""
        shared = None
        if self._has_first:
            found["front"] = self._split.split_front(model)
            if tied:
                shared = next(leaf for leaf in found["front"] if leaf.name == tied)
        for chunk in self._chunks:
            for layer in range(chunk.first_layer, chunk.end_layer):
                name = f"blocks.{layer}"
                found[name] = self._split.split_block(model.blocks[layer], name)
        if self._has_last:
            found["back"] = self._split.split_back(model, tied=tied, shared=shared)
            if shared is not None:
                found["front"] += found.pop("back")
        return found

    @property
    def _has_first(self) -> bool:
        return self._layout.chunks[0] in self._chunks

    @property
    def _has_last(self) -> bool:
        return self._layout.chunks[-1] in self._chunks

    def _units(self, leaves: dict[str, list[Leaf]]) -> dict[str, list[Unit]]:
        """Each kind of weights apart, cut by the shares of the data-parallel ranks."""
        shares = self._layout.stages[self._seat.stage].shares
        units: dict[str, list[Unit]] = {name: [] for name in leaves}
        for kind in Kind:
            some = {
                name: [leaf for leaf in group if kind_of(leaf.value) is kind]
                for name, group in leaves.items()
            }
            some = {name: group for name, group in some.items() if group}
            sizes = [unit_size(leaf.value for leaf in group) for group in some.values()]
            for (name, group), cuts in zip(
                some.items(), cut_units(sizes, shares) if sizes else [], strict=True
            ):
                unit = Unit(
                    name,
                    [(leaf.name, leaf.value) for leaf in group],
                    cuts,
                    wire=self._groups.data,
                    device=self._device,
                    dtype=self._dtype,
                    initial_value=partial(
                        _initial_part, self._model, {leaf.name: leaf for leaf in group}
                    ),
                )
                units[name].append(unit)
        return units

    def _part(self, name: str, units: Sequence[Unit], leaves: Sequence[Leaf]) -> StagePart:
        is_copy = name == "back" and self._model.spec.tied_embeddings
        return StagePart(
            units,
            leaves,
            sharding=self._layout.sharding,
            tensor_group=self._groups.tensor,
            copied=frozenset([TIED] if is_copy else []),
        )

    def _segments(self, chunk: Chunk, parts: dict[str, StagePart]) -> Iterator[Segment]:
        if chunk == self._layout.chunks[0]:
            yield Segment(
                parts["front"],
                self._run_front,
                needs_weights_backward=self._model.first_norm is not None,
                is_entry=True,
            )
        for layer in range(chunk.first_layer, chunk.end_layer):
            kind = kind_of_block(self._recompute, layer)
            is_recomputed = kind is RecomputeKind.FULL
            run = partial(self._run_block, layer)
            yield Segment(
                parts[f"blocks.{layer}"],
                run if is_recomputed else recomputing(run, kind),
                kinds=("forward", "backward"),
                is_recomputed=is_recomputed,
            )
        if chunk == self._layout.chunks[-1]:
            is_split = self._groups.tensor is not None
            part = parts.get("back", parts.get("front"))
            assert part is not None
            yield Segment(part, self._run_back, kinds=("head", ""), is_over_vocabulary=is_split)

    def _run_front(self, _: torch.Tensor | None, batch: torch.Tensor | None) -> torch.Tensor:
        assert batch is not None
        return self._split.enter(self._model.embed(batch)[0])

    def _run_block(
        self, layer: int, hidden: torch.Tensor | None, batch: torch.Tensor | None
    ) -> torch.Tensor:
        assert hidden is not None
        spec = self._model.spec
        if not self._rotary and not spec.learned_positions:
            self._rotary = rotary_tables(spec, self._seq_len, hidden)
        documents = None
        if self._model.is_packed:
            assert batch is not None
            documents = documents_of(batch)
        return self._model.run_block(layer, hidden, Places(self._rotary, documents))

    def _run_back(self, hidden: torch.Tensor | None, batch: torch.Tensor | None) -> torch.Tensor:
        assert hidden is not None
        assert batch is not None
        return local_scalar(self._model.loss_sum(hidden, batch))


def _initial_part(
    model: Transformer,
    leaves: dict[str, Leaf],
    name: str,
    _: nn.Parameter,
    first: int,
    last: int,
) -> torch.Tensor:
    """The beginning of some of one tensor-parallel part of a weight, as that of the whole."""
    leaf = leaves[name]
    return model.initial_part(name, leaf.shape, first, last, leaf.part)
