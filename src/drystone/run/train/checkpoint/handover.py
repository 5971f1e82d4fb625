"""A launch hands its state to the next one of its job, rank to rank (`run/succession.py`).

The launch that leaves offers its state where it is, in memory, after its last step; it never trains
on after that. The ranks of the next one fetch what their split wants. Only when all of it is there
does the next one raise the fence, and with that the job is its own. Where nobody takes the state,
the launch that leaves goes on as if nobody had been there: it writes a checkpoint.
"""

from __future__ import annotations

import json
import secrets
import shutil
import time
from collections.abc import Callable, Mapping
from contextlib import ExitStack
from dataclasses import asdict
from pathlib import Path
from typing import Any, Final

import torch
import torch.distributed.checkpoint as dcp

from drystone.run.fence import Fenced, check_lease, newest_epoch, own_epoch, take_over
from drystone.run.succession import Successor, find_successor, may_begin, offer_folder
from drystone.run.train.checkpoint.checkpoint import (
    Progress,
    checkpoint_state,
    load_state,
    make_optimizer_state,
)
from drystone.run.train.checkpoint.hashes import from_first, gather_objects
from drystone.run.train.checkpoint.peers import (
    PeerGone,
    PieceReader,
    PieceServer,
    PieceWriter,
    as_table,
    connect,
    from_table,
)
from drystone.run.train.emulate import host_memory
from drystone.run.train.stepping import Stepper


class HandOverFailed(Fenced):
    """The state of the launch before could not be taken; no fault of the job's."""


_OFFER: Final = "offer.json"
_LOOK_SECONDS: Final = 0.01
_COMING_SECONDS: Final = 5.0  # for the next launch to see an offer
_FENCE_SECONDS: Final = 2.0  # for its fence to be seen, once it has hung up


def give_state(
    checkpoints: Path, engine: Stepper, optimizer: torch.optim.Optimizer, progress: Progress
) -> bool:
    """Whether the next launch has taken the state; False where there is none. Every rank calls."""
    wire = engine.wire.for_storage()
    successor = from_first(wire, lambda: find_successor(checkpoints.parent, own_epoch()))
    if successor is None:
        return False
    folder = offer_folder(checkpoints, successor.epoch)
    token = from_first(wire, lambda: secrets.token_hex(32))
    with PieceServer(successor.address, token) as server, host_memory():
        if wire.rank == 0:
            shutil.rmtree(folder, ignore_errors=True)
            folder.mkdir(mode=0o700)
        if not optimizer.state:
            make_optimizer_state(optimizer)
        dcp.save(
            dict(checkpoint_state(engine.counted, optimizer)),
            storage_writer=PieceWriter(folder, server, wire.rank),
            process_group=wire.group,
            no_dist=wire.is_alone,
        )
        peers = as_table(gather_objects(wire, server.peer))
        if wire.rank == 0:
            _write_offer(folder, {"token": token, "peers": peers, **asdict(progress)})
        return from_first(wire, lambda: _wait_until_taken(server, successor))


def take_state(
    checkpoints: Path,
    engine: Stepper,
    optimizer: torch.optim.Optimizer,
    tell_ready: Callable[[], None],
) -> Progress | None:
    """Wait for the launch before, and take its state; None where there is none to be had.

    Every rank calls. A state that was taken in part only cannot be begun with: this launch ends
    then, and the next one begins from the newest checkpoint.
    """
    wire, folder = engine.wire.for_storage(), offer_folder(checkpoints, own_epoch())
    if not optimizer.state:
        make_optimizer_state(optimizer)
    wire.barrier()
    tell_ready()
    while not ((folder / _OFFER).exists() or may_begin(checkpoints.parent, own_epoch())):
        check_lease()
        if engine.stop_asked:
            raise Fenced("it was asked to leave before it took over")
        time.sleep(_LOOK_SECONDS)
    offer = from_first(wire, lambda: _read_offer(checkpoints, folder))
    if offer is None:
        optimizer.state.clear()
        _raise_fence(engine)
        return None
    peers, token = from_table(offer["peers"]), str(offer["token"])
    try:
        with ExitStack() as stack:
            if wire.rank == 0:
                stack.enter_context(connect(peers[0], token))  # until all of it is there
            progress = load_state(PieceReader(folder, peers, token), offer, engine, optimizer)
            _raise_fence(engine)
    except Exception as error:
        raise HandOverFailed(f"the state of the launch before was not taken: {error}") from error
    if wire.rank == 0:
        shutil.rmtree(folder, ignore_errors=True)
    return progress


def _wait_until_taken(server: PieceServer, successor: Successor) -> bool:
    """The first rank's: whether the next launch has raised the fence."""
    began = alone_since = time.monotonic()
    while newest_epoch() < successor.epoch:
        check_lease()
        now = time.monotonic()
        if server.num_open:
            alone_since = now
        patience = _FENCE_SECONDS if server.num_seen else _COMING_SECONDS
        if now - max(alone_since, began) > patience:
            return False
        time.sleep(_LOOK_SECONDS)
    return True


def _write_offer(folder: Path, offer: Mapping[str, Any]) -> None:
    scratch = folder / f".{_OFFER}.part"
    scratch.touch(mode=0o600)
    scratch.write_text(json.dumps(offer), encoding="utf-8")
    scratch.replace(folder / _OFFER)


def _read_offer(checkpoints: Path, folder: Path) -> dict[str, Any] | None:
    """What the launch before offers, if it is still there to keep its word."""
    if may_begin(checkpoints.parent, own_epoch()):
        return None
    try:
        offer: dict[str, Any] = json.loads((folder / _OFFER).read_text(encoding="utf-8"))
    except (OSError, ValueError) as error:
        raise PeerGone(f"the offer of the launch before cannot be read: {error}") from None
    return offer


def _raise_fence(engine: Stepper) -> None:
    """The first rank does, when all are there; nobody goes on before."""
    wire = engine.wire.for_storage()
    wire.barrier()

    def raise_it() -> bool:
        take_over()
        return True

    from_first(wire, raise_it)
