"""What agents and their clients share: kinds of refusals, proofs of a secret, ports, interfaces."""

from __future__ import annotations

import fcntl
import hashlib
import hmac
import os
import random
import secrets
import socket
import struct
from collections.abc import Iterator
from contextlib import contextmanager
from enum import StrEnum
from pathlib import Path
from typing import Final

# Below what the kernel gives to outgoing connections, so that few take one by chance.
_LOWEST: Final = 20_000
_HIGHEST: Final = 32_767
_SIOCGIFADDR: Final = 0x8915
_chance = random.Random()


class RefusalKind(StrEnum):
    """Why an agent refuses a request; sent with the error's text, which is for people."""

    INVALID = "invalid"  # the same request would be refused again
    BUSY = "busy"  # an earlier launch still runs there: ask again
    NODE_LOST = "node-lost"  # the node is leaving the cluster
    DISK_FULL = "disk-full"
    SUPERSEDED = "superseded"  # a later controller has taken over


def free_port(host: str, taken: frozenset[int] = frozenset()) -> int:
    """A port of this machine that nobody listens on now, and that is not in `taken`."""
    for _ in range(1000):
        port = _chance.randint(_LOWEST, _HIGHEST)
        if port not in taken and _can_bind(host, port):
            return port
    with socket.socket() as probe:  # all of them taken? Then whatever the kernel has
        probe.bind((host, 0))
        found: int = probe.getsockname()[1]
        return found


def _can_bind(host: str, port: int) -> bool:
    with socket.socket() as probe:
        try:
            probe.bind((host, port))
        except OSError:
            return False
        return True


def interface_of(host: str) -> str:
    """The network interface that has an address, as libraries for collectives want it; or ""."""
    try:
        wanted = socket.inet_aton(socket.gethostbyname(host))
    except OSError:
        return ""
    if wanted[0] == 127:  # all of that network is one interface, which tells one address only
        return "lo"
    with socket.socket(socket.AF_INET, socket.SOCK_DGRAM) as probe:
        for _, name in socket.if_nameindex():
            request = struct.pack("256s", name.encode()[:15])
            try:
                answer = fcntl.ioctl(probe.fileno(), _SIOCGIFADDR, request)
            except OSError:
                continue
            if answer[20:24] == wanted:
                return name
    return ""


def proof_of(secret: str, nonce: str) -> str:
    """What shows that somebody knows the secret."""
    return hmac.new(secret.encode(), nonce.encode(), hashlib.sha256).hexdigest()


def is_proof(secret: str, nonce: str, proof: str) -> bool:
    """Whether somebody knows the secret."""
    return hmac.compare_digest(proof_of(secret, nonce), proof)


def make_nonce() -> str:
    """A number used once."""
    return secrets.token_hex(16)


def keep_secret(path: Path) -> str:
    """The secret in a file that its owner alone can read; made if it is not there."""
    try:
        handle = os.open(path, os.O_WRONLY | os.O_CREAT | os.O_EXCL, 0o600)
    except FileExistsError:
        return path.read_text(encoding="ascii").strip()
    with os.fdopen(handle, "w", encoding="ascii") as file:
        made = secrets.token_hex(32)
        file.write(made + "\n")
    return made


@contextmanager
def short_path(path: Path) -> Iterator[str]:
    """The same file by a short name, as long as we are inside."""
    if len(os.fsencode(path)) <= 100:
        yield str(path)
        return
    handle = os.open(path.parent, os.O_PATH | os.O_DIRECTORY)
    try:
        yield f"/proc/self/fd/{handle}/{path.name}"
    finally:
        os.close(handle)
