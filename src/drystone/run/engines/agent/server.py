"""What an agent answers: one JSON object a line, one answer for each request.

Requests: {"op": "hello" | "launch" | "poll" | "stop" | "forget" | "tail" | "read" | "port" |
"quit", ...}. Requests of a controller carry its epoch; one that is older than the newest seen is
refused. They come over a Unix socket or, from other machines, over TCP with a secret.
"""

from __future__ import annotations

import asyncio
import errno
import json
import os
import re
import shutil
import socket
import sys
import time
from contextlib import suppress
from pathlib import Path
from typing import Any

from drystone.errors import DrystoneError
from drystone.run.engines.agent.keeper import birth_of, kill_strays
from drystone.run.engines.agent.launches import (
    Launch,
    read_json,
    read_lines,
    read_tail,
    write_whole,
)
from drystone.run.engines.agent.network import (
    RefusalKind,
    free_port,
    interface_of,
    is_proof,
    make_nonce,
    short_path,
)

_TICK_SECONDS = 0.1
_FAREWELL_SECONDS = 5.0  # an agent whose node is lost answers for so long, to say so
_PORT_SECONDS = 120.0  # a port that was given out is not given out again before
_MOST_LINE = 16 * 2**20
_NAME = re.compile(r"[A-Za-z0-9][A-Za-z0-9._-]{0,99}")


class RequestRefused(DrystoneError):
    """The agent does not do what it was asked."""

    def __init__(self, message: str, kind: RefusalKind = RefusalKind.INVALID) -> None:
        super().__init__(message)
        self.kind = kind


class Agent:
    """The launches of one node."""

    def __init__(
        self, folder: Path, *, node: str, idle_seconds: float, host: str = "", life: int = 0
    ) -> None:
        self.folder, self.node = folder, node
        self.host = host  # of this machine, as others call it; empty: all is on this machine
        self.leaving = ""  # why the node is lost
        self._life, self._birth = life, birth_of(life) if life else ""
        self._leave_at = float("inf")
        self._idle_seconds, self._heard = idle_seconds, time.monotonic()
        self._ports: dict[int, float] = {}  # that were given out, and when
        self._launches: dict[tuple[str, int], Launch] = {}
        self._noted = ""
        self._controller = int((read_json(folder / "controller.json") or {}).get("epoch", 0))
        self.is_leaving = False
        for path in sorted((folder / "launches").glob("*/launch.json")):
            try:
                launch = Launch(path.parent, read_json(path))
            except (LookupError, TypeError, ValueError) as error:
                self._note(f"{path} is not what was asked for: {error}")
                continue
            launch.recover()
            self._launches[launch.job_id, launch.epoch] = launch

    def answer(self, request: dict[str, Any]) -> dict[str, Any]:
        """Do what is asked."""
        self._heard = time.monotonic()
        name = str(request.get("op"))
        operation = getattr(self, f"_op_{name}", None)
        if operation is None:
            raise RequestRefused(f"there is no operation {name!r}")
        if name not in ("hello", "tail", "read", "read_end"):
            self._check_controller(int(request.get("controller", 0)))
        result: dict[str, Any] = operation(request)
        return result

    def watch(self) -> None:
        """Look after every launch; leave when nobody has asked for anything for long."""
        self._watch_launches()
        is_alive = bool(self._birth) and birth_of(self._life) == self._birth
        if self._life and not self.leaving and not is_alive:
            # Whoever manages this node is dead: others take the node for lost, so it must be.
            self.leaving = f"process {self._life}, which stands for the node, has ended"
            self._leave_at = time.monotonic() + _FAREWELL_SECONDS
            self.end_all()
        is_busy = any(not launch.is_over for launch in self._launches.values())
        if time.monotonic() > self._leave_at:
            self.is_leaving = True
        if not is_busy and time.monotonic() - self._heard > self._idle_seconds:
            self.is_leaving = True

    def _watch_launches(self) -> None:
        running = [launch for launch in self._launches.values() if not launch.is_over]
        for launch in running:
            try:
                launch.watch()
            except Exception as error:  # the trouble of one launch is not that of its neighbours
                self._note(f"{launch.job_id} epoch {launch.epoch}: {type(error).__name__}: {error}")
        if any(launch.is_over for launch in running):
            known = (launch.keepers for launch in self._launches.values())
            kill_strays(frozenset().union(*known))

    def _note(self, text: str) -> None:
        """Say once in the agent's log what is wrong."""
        if text != self._noted:
            self._noted = text
            with suppress(OSError):  # the disk may be full
                sys.stderr.write(text + "\n")
                sys.stderr.flush()

    def end_all(self) -> None:
        """Kill everything: an agent never leaves processes behind."""
        for launch in self._launches.values():
            launch.end(grace_seconds=0, note="the agent was ended")

    def _check_controller(self, epoch: int) -> None:
        if epoch < self._controller:
            raise RequestRefused(
                f"a controller of epoch {self._controller} gave orders after you",
                RefusalKind.SUPERSEDED,
            )
        if epoch > self._controller:
            self._controller = epoch
            with suppress(OSError):  # on a full disk it is known until this agent ends
                write_whole(self.folder / "controller.json", {"epoch": epoch})

    def _find(self, request: dict[str, Any]) -> Launch:
        key = (str(request["job_id"]), int(request["epoch"]))
        if key not in self._launches:
            raise RequestRefused(f"there is no launch {key[0]} epoch {key[1]} on {self.node}")
        return self._launches[key]

    def _op_hello(self, _: dict[str, Any]) -> dict[str, Any]:
        return {
            "node": self.node,
            "pid": os.getpid(),
            "controller": self._controller,
            "leaving": self.leaving,
        }

    def _op_launch(self, request: dict[str, Any]) -> dict[str, Any]:
        """Start; a launch that is known is not started again, whatever became of it."""
        job_id, epoch = str(request["job_id"]), int(request["epoch"])
        if self.leaving:
            raise RequestRefused(f"{self.node} is lost: {self.leaving}", RefusalKind.NODE_LOST)
        if not _NAME.fullmatch(job_id):
            raise RequestRefused(f"{job_id[:40]!r} is not a valid job id")
        if (job_id, epoch) in self._launches:
            return {"is_new": False}
        self._check_devices(
            job_id,
            {int(rank["device"]) for rank in request["ranks"]},
            is_standby=bool(request.get("is_standby")),
        )
        if any(known == job_id and number > epoch for known, number in self._launches):
            raise RequestRefused(f"a later epoch of {job_id} was launched on {self.node}")
        launch = Launch(
            self.folder / "launches" / f"{job_id}.{epoch}", request, self._own_variables()
        )
        shutil.rmtree(launch.folder, ignore_errors=True)  # of an agent that died in `start`
        launch.start()
        self._launches[job_id, epoch] = launch
        return {"is_new": True}

    def _check_devices(self, job_id: str, wanted: set[int], *, is_standby: bool) -> None:
        """Refuse devices that another launch, or an earlier one of the same job, still uses.

        A standby may come up beside the launch that it is to replace: it waits for it.
        """
        for other in self._launches.values():
            other.watch()
            if other.is_over or (is_standby and other.job_id == job_id):
                continue
            if other.job_id == job_id:
                raise RequestRefused(
                    f"epoch {other.epoch} of {job_id} still runs on {self.node}", RefusalKind.BUSY
                )
            if wanted & set(other.devices):
                raise RequestRefused(
                    f"{other.job_id} still runs on devices {sorted(other.devices)}",
                    RefusalKind.BUSY,
                )

    def _op_poll(self, request: dict[str, Any]) -> dict[str, Any]:
        """How all launches stand; those that are named get longer leases."""
        offsets = request.get("offsets", {})
        for job_id, epoch in request.get("renew", ()):
            launch = self._launches.get((str(job_id), int(epoch)))
            if launch is not None and not launch.is_over:
                try:
                    launch.renew(float(request["lease_seconds"]))
                except OSError as error:  # the job removed its lease, or put something else there
                    self._note(f"{job_id} epoch {epoch}: its lease cannot be renewed: {error}")
        self._watch_launches()
        return {
            "launches": [
                launch.describe(int(offsets.get(f"{launch.job_id}.{launch.epoch}", 0)))
                for launch in self._launches.values()
            ],
            "leaving": self.leaving,
        }

    def _op_port(self, _: dict[str, Any]) -> dict[str, Any]:
        """A port that is free, and given to nobody else for a while."""
        now = time.monotonic()
        self._ports = {port: at for port, at in self._ports.items() if now - at < _PORT_SECONDS}
        port = free_port(self.host or "127.0.0.1", frozenset(self._ports))
        self._ports[port] = now
        return {"port": port}

    def _own_variables(self) -> dict[str, str]:
        """Collectives must take the network that the other nodes reach, not what a name gives."""
        interface = interface_of(self.host) if self.host else ""
        if not interface:
            return {}
        return {"GLOO_SOCKET_IFNAME": interface, "NCCL_SOCKET_IFNAME": interface}

    def _op_stop(self, request: dict[str, Any]) -> dict[str, Any]:
        launch = self._find(request)
        launch.end(
            grace_seconds=float(request.get("grace_seconds", 0)), note=str(request.get("note", ""))
        )
        return {"is_over": launch.is_over}

    def _op_forget(self, request: dict[str, Any]) -> dict[str, Any]:
        """What became of a launch is in the controller's log: its folder may go, if asked."""
        launch = self._find(request)
        if not launch.is_over:
            raise RequestRefused(
                f"{launch.job_id} epoch {launch.epoch} still runs", RefusalKind.BUSY
            )
        if request.get("remove_files", False):
            shutil.rmtree(launch.folder, ignore_errors=True)
        else:
            with suppress(OSError):  # unless the job has removed it
                (launch.folder / "launch.json").replace(launch.folder / "forgotten.json")
        del self._launches[launch.job_id, launch.epoch]
        return {}

    def _op_tail(self, request: dict[str, Any]) -> dict[str, Any]:
        return {"text": self._find(request).tail(int(request.get("most_bytes", 4000)))}

    def _op_read_end(self, request: dict[str, Any]) -> dict[str, Any]:
        """The end of one file of a launch."""
        path = self._file_of(request)
        return {"text": read_tail(path, int(request.get("most_bytes", 4000)))}

    def _op_read(self, request: dict[str, Any]) -> dict[str, Any]:
        """Lines of one file of a launch, also of one that was forgotten."""
        text, offset = read_lines(self._file_of(request), int(request.get("offset", 0)))
        return {"text": text, "offset": offset}

    def _file_of(self, request: dict[str, Any]) -> Path:
        name = str(request["name"])
        folder = f"{request['job_id']}.{int(request['epoch'])}"
        if not _NAME.fullmatch(name) or not _NAME.fullmatch(folder):
            raise RequestRefused("no such file")
        return self.folder / "launches" / folder / name

    def _op_quit(self, _: dict[str, Any]) -> dict[str, Any]:
        self.is_leaving = True
        return {}


async def serve(agent: Agent, listener: socket.socket, secret: str = "") -> None:
    """Answer until it is time to leave; with a secret, only those who know it."""

    async def converse(reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        try:
            if secret and not await _knows_secret(reader, writer, secret):
                return
            while line := await reader.readline():
                writer.write(json.dumps(_answer(agent, line)).encode() + b"\n")
                await writer.drain()
        except (TimeoutError, OSError, ValueError):
            pass  # the other side has left in the middle of a line
        finally:
            writer.close()

    # Not `start_unix_server`: from Python 3.13 on it looks for the socket's file by its address,
    # which is a name of the past where the path was long (`short_path`).
    server = await asyncio.start_server(converse, sock=listener, limit=_MOST_LINE)
    async with server:
        while not agent.is_leaving:
            agent.watch()
            await asyncio.sleep(_TICK_SECONDS)
    agent.end_all()


async def _knows_secret(
    reader: asyncio.StreamReader, writer: asyncio.StreamWriter, secret: str
) -> bool:
    nonce = make_nonce()
    writer.write(json.dumps({"nonce": nonce}).encode() + b"\n")
    await writer.drain()
    told = json.loads(await asyncio.wait_for(reader.readline(), 10.0))
    return isinstance(told, dict) and is_proof(secret, nonce, str(told.get("proof", "")))


def _answer(agent: Agent, line: bytes) -> dict[str, Any]:
    kind = RefusalKind.INVALID
    try:
        request = json.loads(line)
        if not isinstance(request, dict):
            raise RequestRefused("a request is a JSON object")
        return {"ok": True, **agent.answer(request)}
    except RequestRefused as error:
        kind, text = error.kind, str(error)
    except DrystoneError as error:
        text = str(error)
    except (ValueError, KeyError, TypeError) as error:
        text = f"not a request: {type(error).__name__} {error}"
    except OSError as error:  # a full disk, a command that is not there
        text = str(error)
        if error.errno in (errno.ENOSPC, errno.EDQUOT):
            kind = RefusalKind.DISK_FULL
    return {"ok": False, "error": text, "kind": kind}


def listen(folder: Path) -> socket.socket:
    """The agent's socket; only this user may connect."""
    path = folder / "agent.sock"
    path.unlink(missing_ok=True)
    listener = socket.socket(socket.AF_UNIX, socket.SOCK_STREAM)
    with short_path(path) as name:
        old = os.umask(0o177)
        try:
            listener.bind(name)
        finally:
            os.umask(old)
    listener.listen(64)
    return listener


def listen_remote(folder: Path, host: str) -> socket.socket:
    """A socket for other machines; where it is stands in `address.json`."""
    family = socket.AF_INET6 if ":" in host else socket.AF_INET
    listener = socket.socket(family, socket.SOCK_STREAM)
    listener.bind((host, 0))
    listener.listen(64)
    address = {"host": host, "port": listener.getsockname()[1], "pid": os.getpid()}
    write_whole(folder / "address.json", address)
    return listener
