"""Who holds which part of a layer's weights, gradients and optimizer state, however unequal.

All parameters of a unit (a block, or what stands around the blocks) lie one after another in one
flat buffer, each at a multiple of 16 bytes. Cuts divide it among the ranks; a rank keeps its piece
in fp32 and the optimizer works on that piece alone. The buffer itself exists only while the layer
is computed: `gather` fills it, `free` gives its memory back, and the module's parameters are views
of it all the while. A unit may also be replicated: then every rank holds all of it, and only
gradients are exchanged.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass
from enum import StrEnum
from functools import partial
from itertools import accumulate

import torch
from torch import nn

from drystone.run.train.checkpoint.slices import Box, Slice
from drystone.run.train.collectives import Pending, Wire
from drystone.run.train.emulate import host_memory, resize_storage
from drystone.run.train.uneven.cuts import aligned


@dataclass(frozen=True, slots=True, eq=False)
class Owned:
    """The elements `[start, end)` of one parameter, in row-major order, that this rank holds."""

    name: str
    shape: torch.Size
    start: int
    end: int
    value: nn.Parameter  # 1-D; a view of the unit's piece; fp32 if trained
    part: Box | None = None  # of the parameter, within which they are counted; None: all of it
    is_counted: bool = True  # not a copy of what another rank holds too
    is_in_block: bool = False  # not of what stands around the blocks

    def slice_of(self, values: torch.Tensor) -> Slice:
        """Values for these elements, placed in the whole."""
        return Slice(values, self.shape, self.start, self.part)


# Elements [first, last) of a parameter, row by row. Every rank asks for every parameter, in one
# order, though it may be for none of its elements.
BLOCK = "block"  # with which the name of a unit begins whose parameters are those of a block
InitialValue = Callable[[str, nn.Parameter, int, int], torch.Tensor]


class Kind(StrEnum):
    """What parameters of one unit have in common."""

    TRAINED = "trained"
    FROZEN = "frozen"
    PACKED = "packed"  # frozen, in bytes (`models/quantised.py`)


def kind_of(parameter: nn.Parameter) -> Kind:
    """Whether it is trained, and in which form it is kept."""
    if parameter.dtype == torch.uint8:
        return Kind.PACKED
    return Kind.TRAINED if parameter.requires_grad else Kind.FROZEN


class Unit:
    """Parameters that are gathered together, all of one kind, and this rank's piece.

    A trained piece is fp32, whatever the model computes in; a frozen one has the compute dtype,
    for nothing is ever added to it, and a packed one is gathered as it is kept.
    """

    def __init__(
        self,
        name: str,
        parameters: Sequence[tuple[str, nn.Parameter]],
        cuts: Sequence[int],
        *,
        wire: Wire,
        device: torch.device,
        dtype: torch.dtype,
        initial_value: InitialValue,
        is_replicated: bool = False,
    ) -> None:
        self.name, self.cuts, self._wire = name, tuple(cuts), wire
        self.is_replicated = is_replicated and wire.num_ranks > 1
        self.parameters = [parameter for _, parameter in parameters]
        self.is_trained = any(parameter.requires_grad for parameter in self.parameters)
        if any(kind_of(parameter) is Kind.PACKED for parameter in self.parameters):
            dtype = torch.uint8
        start, end = 0, self.cuts[-1]
        if not is_replicated:
            start, end = self.cuts[wire.rank], self.cuts[wire.rank + 1]
        self._piece = torch.zeros(
            end - start, dtype=torch.float32 if self.is_trained else dtype, device=device
        )
        self._piece_gradient: torch.Tensor | None = None
        self._gradient: torch.Tensor | None = None  # of the whole unit, fp32
        sizes = [aligned(parameter.numel()) for parameter in self.parameters]
        self._offsets = [0, *accumulate(sizes)][:-1]
        self._fill_piece(parameters, start, end, initial_value)
        # Who holds the whole computes with it if the dtype is the same.
        self._is_local = is_replicated or wire.num_ranks == 1
        self._is_whole = self._is_local and self._piece.dtype == dtype
        if self._is_whole:
            self._flat = self._piece
        else:
            self._flat = torch.empty(self.cuts[-1], dtype=dtype, device=device)
        for parameter, offset in zip(self.parameters, self._offsets, strict=True):
            view = self._flat[offset : offset + parameter.numel()]
            parameter.data = view.view(parameter.shape)
        # A single rank takes fp32 gradients as the backward passes leave them: no buffer, no copy.
        self._is_direct = self.is_trained and wire.num_ranks == 1 and dtype == torch.float32
        self._takes_gradients = False
        if self.is_trained and not self._is_direct:
            self._fold_gradients()
        self.owned = list(self._owned(parameters, start, end))
        self.is_gathered = False
        self._pending: Pending | None = None
        self._sent: torch.Tensor | None = None
        self._flat_bytes = self._flat.nbytes
        self._release()

    def start_gather(self) -> None:
        """Begin to fill the buffer; `gather` waits for it."""
        if self.is_gathered or self._pending is not None:
            return
        if self._is_local:
            self._wire.traffic.count("gather", 0)
            if not self._is_whole:
                resize_storage(self._flat, self._flat_bytes)
                self._flat.copy_(self._piece)
            self._pending = Pending((), _nothing)
            return
        resize_storage(self._flat, self._flat_bytes)
        self._sent = self._piece.to(self._flat.dtype)  # must outlive the collective
        self._pending = self._wire.gather(self._sent, self._flat, self.cuts)

    def gather(self) -> None:
        """Make the module's parameters usable."""
        if self.is_gathered:
            return
        self.start_gather()
        assert self._pending is not None
        self._pending.wait()
        self._pending, self._sent, self.is_gathered = None, None, True

    def free(self) -> None:
        """Give the memory of the gathered parameters back."""
        self.is_gathered = False
        self._release()

    def leave(self) -> None:
        """The weights will change; their memory stays for the next time."""
        self.is_gathered = False

    def begin_gradients(self, *, is_late: bool = False) -> None:
        """From here on, backward passes add into one flat gradient; late: made with the first."""
        self._takes_gradients = self.is_trained
        if self.is_trained and not self._is_direct and not is_late:
            self._whole_gradient()

    def _fold_gradients(self) -> None:
        """Add gradients in fp32, each as soon as it is there, and let go of it."""

        def fold(offset: int, parameter: torch.Tensor) -> None:
            if self._takes_gradients and parameter.grad is not None:
                view = self._whole_gradient()[offset : offset + parameter.numel()]
                view += parameter.grad.reshape(-1)
                parameter.grad = None

        for parameter, offset in zip(self.parameters, self._offsets, strict=True):
            parameter.register_post_accumulate_grad_hook(partial(fold, offset))

    def _whole_gradient(self) -> torch.Tensor:
        if self._gradient is None:
            self._gradient = torch.zeros(
                self.cuts[-1], dtype=torch.float32, device=self._flat.device
            )
        return self._gradient

    def gradients(self) -> list[torch.Tensor]:
        """Of each parameter, fp32, before they are reduced."""
        if self._is_direct:
            for parameter in self.parameters:
                if parameter.grad is None:
                    parameter.grad = torch.zeros_like(parameter)
            return [_flattened(parameter) for parameter in self.parameters]
        whole = self._whole_gradient()
        return [
            whole[offset : offset + one.numel()]
            for one, offset in zip(self.parameters, self._offsets, strict=True)
        ]

    def start_reduce(self) -> Pending:
        """Sum the gradients over all ranks; after waiting, each owned value has its `grad`."""
        if not self.is_trained:
            return Pending((), _nothing)
        left = self.gradients() if self._is_direct else []
        for parameter in self.parameters:
            parameter.grad = None
        if self._is_direct:
            self._wire.traffic.count("reduce", 0)
            return Pending((), partial(self._take_gradients, left))
        whole, self._gradient, self._takes_gradients = self._whole_gradient(), None, False
        if self._is_local:
            self._piece_gradient = whole
            if self.is_replicated:
                return self._start_sum(whole)
            self._wire.traffic.count("reduce", 0)
            return Pending((), self._set_owned_gradients)
        self._piece_gradient = torch.empty_like(self._piece)
        summed = self._wire.reduce(whole, self._piece_gradient, self.cuts)

        def finish() -> None:
            nonlocal whole
            summed.wait()
            del whole  # it was read until here; the unit itself has let go of it
            self._set_owned_gradients()

        return Pending((), finish)

    def _take_gradients(self, gradients: list[torch.Tensor]) -> None:
        given = (gradient for gradient in gradients if gradient.numel())
        for one, gradient in zip(self.owned, given, strict=True):
            one.value.grad = gradient
        gradients.clear()

    def _start_sum(self, gradient: torch.Tensor) -> Pending:
        """Of all ranks, in place."""
        summed = self._wire.sum(gradient, kind="reduce")

        def finish() -> None:
            summed.wait()
            self._set_owned_gradients()

        return Pending((), finish)

    def _set_owned_gradients(self) -> None:
        assert self._piece_gradient is not None
        base = self._piece.storage_offset()
        for one in self.owned:
            at = one.value.storage_offset() - base
            one.value.grad = self._piece_gradient[at : at + one.value.numel()]
        self._piece_gradient = None  # the owned values hold it from here on

    def _fill_piece(
        self,
        parameters: Sequence[tuple[str, nn.Parameter]],
        start: int,
        end: int,
        initial_value: InitialValue,
    ) -> None:
        """Parameter by parameter: never more than one of them is whole on a rank for this."""
        for (name, parameter), offset in zip(parameters, self._offsets, strict=True):
            first = min(max(start, offset), end)
            last = max(min(end, offset + parameter.numel()), first)
            with host_memory():
                values = initial_value(name, parameter, first - offset, last - offset)
                self._piece[first - start : last - start].copy_(values)
            del values

    def _owned(
        self, parameters: Sequence[tuple[str, nn.Parameter]], start: int, end: int
    ) -> Iterator[Owned]:
        ranks = self._wire.num_ranks if self.is_replicated else 1
        for at, ((name, parameter), offset) in enumerate(
            zip(parameters, self._offsets, strict=True)
        ):
            first = max(start, offset)
            last = min(end, offset + parameter.numel())
            if first < last:
                value = nn.Parameter(
                    self._piece[first - start : last - start], requires_grad=self.is_trained
                )
                # What every rank holds, each counts, and saves, a part of.
                is_counted = at % ranks == self._wire.rank % ranks
                yield Owned(
                    name,
                    parameter.shape,
                    first - offset,
                    last - offset,
                    value,
                    is_counted=is_counted,
                    is_in_block=self.name.startswith(BLOCK),
                )

    def _release(self) -> None:
        if not self._is_whole:
            resize_storage(self._flat, 0)


class Layer:
    """The units that are used together: one, or a trained and a frozen one."""

    def __init__(self, units: Sequence[Unit]) -> None:
        self.units = tuple(units)

    @property
    def is_trained(self) -> bool:
        """Whether anything in it is."""
        return any(unit.is_trained for unit in self.units)

    @property
    def is_gathered(self) -> bool:
        """Whether the module's parameters are usable now."""
        return all(unit.is_gathered for unit in self.units)

    def start_gather(self) -> None:
        """Begin to fill the buffers; `gather` waits for it."""
        for unit in self.units:
            unit.start_gather()

    def gather(self) -> None:
        """Make the module's parameters usable."""
        self.start_gather()
        for unit in self.units:
            unit.gather()

    def free(self) -> None:
        """Give the memory of the gathered parameters back."""
        for unit in self.units:
            unit.free()

    def leave(self) -> None:
        """The weights will change; their memory stays for the next time."""
        for unit in self.units:
            unit.leave()

    def trained_parameters(self) -> list[nn.Parameter]:
        """Those that get gradients."""
        return [one for unit in self.units if unit.is_trained for one in unit.parameters]

    def begin_gradients(self, *, is_late: bool = False) -> None:
        """From here on, backward passes add into flat gradients."""
        for unit in self.units:
            unit.begin_gradients(is_late=is_late)

    def start_reduce(self) -> Pending:
        """Sum the gradients over all ranks."""
        pending = [unit.start_reduce() for unit in self.units if unit.is_trained]

        def finish() -> None:
            while pending:
                pending.pop(0).wait()

        return Pending((), finish)


def value_of_rank_0(wire: Wire, device: torch.device) -> InitialValue:
    """The parameter as rank 0 made it, should the ranks have been seeded differently."""

    def value(_: str, parameter: nn.Parameter, first: int, last: int) -> torch.Tensor:
        whole = parameter.detach().to(device, torch.float32).contiguous()
        if wire.num_ranks > 1:
            whole = whole.clone() if whole.data_ptr() == parameter.data_ptr() else whole
            torch.distributed.broadcast(whole, group_src=0, group=wire.group)
        return whole.reshape(-1)[first:last]

    return value


def _flattened(parameter: nn.Parameter) -> torch.Tensor:
    """Its gradient as a view of one dimension."""
    assert parameter.grad is not None
    parameter.grad = parameter.grad.contiguous()
    return parameter.grad.view(-1)


def _nothing() -> None:
    pass
