"""Who holds which part of a layer's weights, gradients and optimizer state, however unequal.

All parameters of a unit (a block, or what stands around the blocks) lie one after another in one
flat buffer. Cuts divide it among the ranks; a rank keeps its piece in fp32 and the optimizer works
on that piece alone. The buffer itself exists only while the layer is computed: `gather` fills it,
`free` gives its memory back, and the module's parameters are views of it all the while.
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from dataclasses import dataclass

import torch
from torch import nn

from drystone.errors import InvalidSpec
from drystone.run.runtime.collectives import Pending, Wire


@dataclass(frozen=True, slots=True, eq=False)
class Owned:
    """The elements `[start, end)` of one parameter, in row-major order, that this rank holds."""

    name: str
    shape: torch.Size
    start: int
    end: int
    value: nn.Parameter  # 1-D, fp32; a view of the unit's piece


def cut_units(sizes: Sequence[int], shares: Sequence[float]) -> list[tuple[int, ...]]:
    """Cuts of every unit such that rank r holds about `shares[r]` of all elements.

    As many units as possible are cut evenly, for the collectives over equal pieces are the fast
    ones: units are cut evenly, in order, as long as every rank has quota left for it, and the
    others by the quotas that are left (Cephalo, arXiv:2411.01075). An even unit is padded to a
    multiple of the number of ranks.
    """
    shares = _normalised(shares)
    left = [share * sum(sizes) for share in shares]
    cuts = []
    is_even = True
    for size in sizes:
        each = -(-size // len(shares))
        # Equal shares stay even to the end, whatever rounding leaves of the quotas.
        is_even = is_even and (len(set(shares)) == 1 or min(left) >= each)
        if is_even:
            cuts.append(tuple(each * rank for rank in range(len(shares) + 1)))
            left = [quota - each for quota in left]
        else:
            cuts.append(cut_by_shares(size, left))
    return cuts


def cut_by_shares(size: int, shares: Sequence[float]) -> tuple[int, ...]:
    """Cuts of one unit in proportion to the shares; a share of 0 gives an empty piece."""
    total = sum(shares)
    cuts, reached = [0], 0.0
    last = max(rank for rank, share in enumerate(shares) if share > 0)
    for rank, share in enumerate(shares):
        reached += max(share, 0.0) / total
        cuts.append(size if rank >= last else round(size * min(reached, 1.0)))
    return tuple(cuts)


def _normalised(shares: Sequence[float]) -> list[float]:
    total = sum(shares)
    if not shares or min(shares) < 0 or total <= 0:
        raise InvalidSpec(f"state shares {list(shares)}: none may be negative, not all 0")
    return [share / total for share in shares]


class Unit:
    """The parameters that are gathered together, and this rank's piece of them."""

    def __init__(
        self,
        name: str,
        parameters: Sequence[tuple[str, nn.Parameter]],
        cuts: Sequence[int],
        *,
        wire: Wire,
        device: torch.device,
        dtype: torch.dtype,
    ) -> None:
        self.name, self.cuts, self._wire = name, tuple(cuts), wire
        self._parameters = [parameter for _, parameter in parameters]
        self._flat = torch.zeros(cuts[-1], dtype=dtype, device=device)
        whole = torch.zeros(cuts[-1], dtype=torch.float32, device=device)
        start, end = self.cuts[wire.rank], self.cuts[wire.rank + 1]
        self._piece = torch.empty(end - start, dtype=torch.float32, device=device)
        self._piece_gradient: torch.Tensor | None = None
        self._gradient: torch.Tensor | None = None  # of the whole unit, fp32
        self._micro: torch.Tensor | None = None  # the same in the compute dtype, if that is another
        self._offsets: list[int] = []
        offset = 0
        for parameter in self._parameters:
            size = parameter.numel()
            whole[offset : offset + size] = parameter.detach().reshape(-1)
            self._offsets.append(offset)
            parameter.data = self._flat[offset : offset + size].view(parameter.shape)
            offset += size
        self._wire_first_value(whole)
        self._piece.copy_(whole[start:end])
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
        self._flat.untyped_storage().resize_(self._flat_bytes)
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

    def begin_gradients(self) -> None:
        """From here on, backward passes add into one flat gradient."""
        self._gradient = torch.zeros(self.cuts[-1], dtype=torch.float32, device=self._flat.device)
        target = self._gradient
        if self._flat.dtype != torch.float32:
            target = self._micro = torch.zeros_like(self._gradient, dtype=self._flat.dtype)
        for parameter, offset in zip(self._parameters, self._offsets, strict=True):
            if parameter.requires_grad:
                view = target[offset : offset + parameter.numel()]
                parameter.grad = view.view(parameter.shape)

    def fold_gradients(self) -> None:
        """Add the gradient of one micro-batch in fp32, where it was computed in 16 bit."""
        if self._micro is not None and self._gradient is not None:
            self._gradient += self._micro
            self._micro.zero_()

    def start_reduce(self) -> Pending:
        """Sum the gradients over all ranks; after waiting, each owned value has its `grad`."""
        assert self._gradient is not None
        for parameter in self._parameters:
            parameter.grad = None
        self._piece_gradient = torch.empty_like(self._piece)
        summed = self._wire.reduce(self._gradient, self._piece_gradient, self.cuts)
        # The pending reduction keeps what it reads alive; the unit lets go of it.
        sent, self._gradient, self._micro = self._gradient, None, None

        def finish() -> None:
            nonlocal sent
            summed.wait()
            del sent
            self._set_owned_gradients()

        return Pending((), finish)

    def _set_owned_gradients(self) -> None:
        assert self._piece_gradient is not None
        base = self._piece.storage_offset()
        for one in self.owned:
            if one.value.requires_grad:
                at = one.value.storage_offset() - base
                one.value.grad = self._piece_gradient[at : at + one.value.numel()]

    def _owned(
        self, parameters: Sequence[tuple[str, nn.Parameter]], start: int, end: int
    ) -> Iterator[Owned]:
        for (name, parameter), offset in zip(parameters, self._offsets, strict=True):
            first = max(start, offset)
            last = min(end, offset + parameter.numel())
            if first < last:
                value = nn.Parameter(self._piece[first - start : last - start])
                value.requires_grad_(parameter.requires_grad)
                yield Owned(name, parameter.shape, first - offset, last - offset, value)

    def _wire_first_value(self, whole: torch.Tensor) -> None:
        """The model of rank 0 counts, should the ranks have been seeded differently."""
        if self._wire.num_ranks > 1:
            torch.distributed.broadcast(whole, group_src=0, group=self._wire.group)

    def _release(self) -> None:
        self._flat.untyped_storage().resize_(0)
