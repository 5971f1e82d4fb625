"""Pieces of a job's state over the network, from the ranks that hold them to those that want them.

torch's distributed checkpoints plan who holds and who wants which boxes of which tensors, whatever
the two splits are. Here a box is not written to a file: its rank keeps it and serves it over TCP.
A connection says the token, then lists of boxes as JSON, and gets their bytes in that order.
"""

from __future__ import annotations

import hmac
import json
import socket
import struct
import threading
from collections.abc import Sequence
from contextlib import ExitStack
from dataclasses import dataclass
from pathlib import Path
from types import TracebackType
from typing import Any, Final

import torch
import torch.distributed.checkpoint as dcp
from torch.distributed.checkpoint.filesystem import _StorageInfo
from torch.distributed.checkpoint.metadata import Metadata, MetadataIndex
from torch.distributed.checkpoint.planner import (
    LoadPlan,
    LoadPlanner,
    ReadItem,
    SavePlan,
    SavePlanner,
)
from torch.distributed.checkpoint.storage import WriteResult
from torch.futures import Future

from drystone.errors import DrystoneError
from drystone.run.train.checkpoint.contents import SafeReader

_LENGTH: Final = struct.Struct("!Q")
_MAX_REQUEST_BYTES: Final = 2**28
_MAX_TOKEN_BYTES: Final = 256
_CONNECT_SECONDS: Final = 10.0
_SILENCE_SECONDS: Final = 60.0  # of a peer in the middle of an answer
_Name = tuple[str, tuple[int, ...]]  # of a tensor, and where its box begins


class PeerGone(DrystoneError):
    """A rank that held state does not answer any more."""


@dataclass(frozen=True, slots=True)
class Peer:
    """Where a rank serves its pieces."""

    host: str
    port: int


class PieceServer:
    """Serves pieces of this rank to whoever knows the token, in threads, until it is closed."""

    def __init__(self, address: str, token: str) -> None:
        """`address` is of somebody who will ask: it says on which network to listen."""
        self._token, self.pieces = token, dict[_Name, torch.Tensor]()
        self.num_open = self.num_seen = 0  # connections that knew the token
        self._lock = threading.Lock()
        family, _, _, _, where = socket.getaddrinfo(address, 1, type=socket.SOCK_DGRAM)[0]
        with socket.socket(family, socket.SOCK_DGRAM) as probe:
            probe.connect(where)  # sends nothing
            host = str(probe.getsockname()[0])
        self._listener = socket.create_server((host, 0), family=family, backlog=128)
        self.peer = Peer(host, int(self._listener.getsockname()[1]))
        threading.Thread(target=self._accept, name="pieces", daemon=True).start()

    def __enter__(self) -> PieceServer:
        return self

    def __exit__(
        self, _: type[BaseException] | None, __: BaseException | None, ___: TracebackType | None
    ) -> None:
        self._listener.close()
        self.pieces = {}

    def _accept(self) -> None:
        while True:
            try:
                connection, _ = self._listener.accept()
            except OSError:
                return  # it was closed
            threading.Thread(target=self._serve, args=(connection,), daemon=True).start()

    def _serve(self, connection: socket.socket) -> None:
        with connection:
            try:
                connection.settimeout(_SILENCE_SECONDS)
                connection.setsockopt(socket.IPPROTO_TCP, socket.TCP_NODELAY, 1)
                if not hmac.compare_digest(
                    _receive(connection, _MAX_TOKEN_BYTES), self._token.encode()
                ):
                    return
            except (OSError, ValueError):
                return
            self._count(1, is_new=True)
            try:
                connection.settimeout(None)  # whoever asked for all it wants stays until the end
                while True:
                    for name, begin, offsets, lengths in json.loads(_receive(connection)):
                        whole = self.pieces[name, tuple(begin)]
                        connection.sendall(_bytes_of(_narrowed(whole, offsets, lengths)))
            except (OSError, ValueError, KeyError, TypeError, RuntimeError):
                return
            finally:
                self._count(-1)

    def _count(self, change: int, *, is_new: bool = False) -> None:
        with self._lock:
            self.num_open += change
            self.num_seen += is_new


class PieceWriter(dcp.StorageWriter):
    """Puts the pieces of a rank on its server, and the table of contents into a folder."""

    def __init__(self, folder: Path, server: PieceServer, rank: int) -> None:
        self._folder, self._server, self._rank = folder, server, rank

    def reset(self, checkpoint_id: Any = None) -> None:
        """There is one state, and one folder."""

    def set_up_storage_writer(self, *_: Any, **__: Any) -> None:
        """The server is there already."""

    def prepare_local_plan(self, plan: SavePlan) -> SavePlan:
        """As it is."""
        return plan

    def prepare_global_plan(self, plans: list[SavePlan]) -> list[SavePlan]:
        """As they are."""
        return plans

    def write_data(self, plan: SavePlan, planner: SavePlanner) -> Future[list[WriteResult]]:
        """Nothing is copied: pieces are read where they are."""
        results = []
        for item in plan.items:
            piece = planner.resolve_data(item)
            assert isinstance(piece, torch.Tensor)  # checkpoints hold nothing else
            piece = piece.detach()
            self._server.pieces[item.index.fqn, _begin(item.index, piece)] = piece
            where = _StorageInfo(relative_path=str(self._rank), offset=0, length=piece.nbytes)
            results.append(WriteResult(item.index, piece.nbytes, where))
        done: Future[list[WriteResult]] = Future()
        done.set_result(results)
        return done

    def finish(self, metadata: Metadata, results: list[list[WriteResult]]) -> None:
        """The table of contents: who holds what."""
        dcp.FileSystemWriter(self._folder, sync_files=False).finish(metadata, results)

    @classmethod
    def validate_checkpoint_id(cls, checkpoint_id: Any) -> bool:
        """There is none to choose."""
        return False


class PieceReader(SafeReader):
    """Asks the ranks that hold the pieces for those that this rank wants."""

    def __init__(self, folder: Path, peers: Sequence[Peer], token: str) -> None:
        super().__init__(folder)
        self._peers, self._token = peers, token

    def read_data(self, plan: LoadPlan, planner: LoadPlanner) -> Future[None]:
        """All ranks are asked at once, and answer side by side."""
        wanted: dict[int, list[ReadItem]] = {}
        for item in plan.items:
            rank = int(self.storage_data[item.storage_index].relative_path)
            wanted.setdefault(rank, []).append(item)
        try:
            with ExitStack() as stack:
                asked = {
                    rank: stack.enter_context(connect(self._peers[rank], self._token))
                    for rank in wanted
                }
                for rank, items in wanted.items():
                    boxes = [_box(item, planner.resolve_tensor(item)) for item in items]
                    _send(asked[rank], json.dumps(boxes).encode())
                for rank, items in wanted.items():
                    for item in items:
                        _fill(asked[rank], planner, item)
        except OSError as error:
            raise PeerGone(f"a rank of the launch before does not answer: {error}") from None
        done: Future[None] = Future()
        done.set_result(None)
        return done


def connect(peer: Peer, token: str) -> socket.socket:
    """A connection that has said the token."""
    try:
        made = socket.create_connection((peer.host, peer.port), _CONNECT_SECONDS)
        made.settimeout(_SILENCE_SECONDS)
        made.setsockopt(socket.IPPROTO_TCP, socket.TCP_NODELAY, 1)
        _send(made, token.encode())
    except OSError as error:
        raise PeerGone(f"{peer.host}:{peer.port} does not answer: {error}") from None
    return made


def _box(item: ReadItem, target: torch.Tensor) -> list[Any]:
    begin = _begin(item.storage_index, target)
    return [item.storage_index.fqn, begin, list(item.storage_offsets), list(item.lengths)]


def _begin(index: MetadataIndex, piece: torch.Tensor) -> tuple[int, ...]:
    """Where a box begins; a tensor that is not divided begins at 0."""
    return tuple(index.offset) if index.offset is not None else (0,) * piece.dim()


def _narrowed(piece: torch.Tensor, offsets: Sequence[int], lengths: Sequence[int]) -> torch.Tensor:
    for dim, (offset, length) in enumerate(zip(offsets, lengths, strict=True)):
        piece = piece.narrow(dim, offset, length)
    return piece


def _bytes_of(piece: torch.Tensor) -> memoryview:
    flat = piece.cpu().contiguous().reshape(-1)
    return memoryview(flat.view(torch.uint8).numpy())


def _fill(connection: socket.socket, planner: LoadPlanner, item: ReadItem) -> None:
    target = planner.resolve_tensor(item).detach()
    received = torch.empty(tuple(item.lengths), dtype=target.dtype)
    _receive_into(connection, memoryview(received.reshape(-1).view(torch.uint8).numpy()))
    target.copy_(received)
    planner.commit_tensor(item, target)


def _send(connection: socket.socket, text: bytes) -> None:
    connection.sendall(_LENGTH.pack(len(text)) + text)


def _receive(connection: socket.socket, max_bytes: int = _MAX_REQUEST_BYTES) -> bytes:
    head = bytearray(_LENGTH.size)
    _receive_into(connection, memoryview(head))
    (size,) = _LENGTH.unpack(head)
    if size > max_bytes:
        raise ValueError(f"a request of {size} bytes")
    text = bytearray(size)
    _receive_into(connection, memoryview(text))
    return bytes(text)


def _receive_into(connection: socket.socket, room: memoryview) -> None:
    while room:
        size = connection.recv_into(room)
        if not size:
            raise ConnectionResetError("the connection was closed")
        room = room[size:]


def as_table(peers: Sequence[Peer]) -> list[list[Any]]:
    """Peers as JSON."""
    return [[peer.host, peer.port] for peer in peers]


def from_table(table: Sequence[Sequence[Any]]) -> list[Peer]:
    """Peers from JSON."""
    return [Peer(str(host), int(port)) for host, port in table]
