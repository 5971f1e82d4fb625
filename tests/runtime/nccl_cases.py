"""What two ranks do that keeps the rules of NCCL, and what breaks each of them."""

from collections.abc import Callable
from datetime import timedelta

import torch
import torch.distributed as dist
from nccl_rules import BrokenRule

Outcome = str | float
_SECONDS = 1  # until a hang counts as one; those here are real, so no slow machine changes them


def try_rules() -> dict[str, Outcome]:
    """What came of each: a number, or what was said of the broken rule. Each has its own group."""
    found: dict[str, Outcome] = {}
    for try_rule in (
        exchange_in_one_order,
        send_from_both_sides,
        receive_by_tag_in_another_order,
        meet_in_two_groups,
        send_to_oneself,
        call_other_collectives,
        call_another_size,
        use_before_waiting,
        gather_before_waiting,
        change_before_waiting,
    ):
        found[try_rule.__name__] = _outcome(try_rule)
    return found


def _outcome(try_rule: Callable[[dist.ProcessGroup, int], float]) -> Outcome:
    group = dist.new_group(timeout=timedelta(seconds=_SECONDS))
    try:
        return try_rule(group, dist.get_rank())
    except BrokenRule as error:
        return str(error)


def exchange_in_one_order(group: dist.ProcessGroup, rank: int) -> float:
    given, taken = torch.full((3,), 1.0 + rank), torch.zeros(3)
    if rank == 0:
        works = [dist.isend(given, 1, group), dist.irecv(taken, 1, group)]
    else:
        works = [dist.irecv(taken, 0, group), dist.isend(given, 0, group)]
    for work in works:
        work.wait()
    dist.all_reduce(taken, group=group)
    return taken.mean().item()


def send_from_both_sides(group: dist.ProcessGroup, rank: int) -> float:
    sent = dist.isend(torch.zeros(3), 1 - rank, group)
    received = dist.irecv(torch.zeros(3), 1 - rank, group)
    received.wait()
    sent.wait()
    return 0.0


def receive_by_tag_in_another_order(group: dist.ProcessGroup, rank: int) -> float:
    for tag in (1, 2) if rank else (2, 1):
        tensor = torch.zeros(tag)
        start = dist.isend if rank else dist.irecv
        start(tensor, 1 - rank, group, tag).wait()
    return 0.0


def meet_in_two_groups(group: dist.ProcessGroup, rank: int) -> float:
    other = dist.new_group(timeout=timedelta(seconds=_SECONDS))
    first, second = (group, other) if rank else (other, group)
    received = dist.irecv(torch.zeros(3), 1 - rank, first)
    dist.isend(torch.zeros(3), 1 - rank, second).wait()
    received.wait()
    return 0.0


def send_to_oneself(group: dist.ProcessGroup, rank: int) -> float:
    dist.isend(torch.zeros(3), rank, group)
    return 0.0


def call_other_collectives(group: dist.ProcessGroup, rank: int) -> float:
    if rank == 0:
        dist.all_reduce(torch.zeros(4), group=group)
    else:
        dist.broadcast(torch.zeros(4), 0, group=group)
    return 0.0


def call_another_size(group: dist.ProcessGroup, rank: int) -> float:
    dist.all_reduce(torch.zeros(4 + rank), group=group)
    return 0.0


def use_before_waiting(group: dist.ProcessGroup, rank: int) -> float:
    tensor = torch.zeros(3)
    if rank == 0:
        dist.isend(tensor, 1, group).wait()
        return 0.0
    work = dist.irecv(tensor, 0, group)
    early = tensor.sum().item()
    work.wait()
    return early


def gather_before_waiting(group: dist.ProcessGroup, rank: int) -> float:
    table = torch.zeros(4)
    work = dist.all_gather_single(table, torch.ones(2), group=group, async_op=True)
    early = table.sum().item()
    work.wait()
    return early


def change_before_waiting(group: dist.ProcessGroup, rank: int) -> float:
    tensor = torch.zeros(3)
    if rank == 1:
        dist.irecv(tensor, 0, group).wait()
        return tensor.sum().item()
    work = dist.isend(tensor, 1, group)
    tensor += 1
    work.wait()
    return 0.0
