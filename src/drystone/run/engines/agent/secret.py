"""Who may give orders to an agent over the network? Whoever knows the secret of its controller.

The agent sends a number that it uses once, the other side answers with a keyed digest of it, so the
secret itself does not cross the wire. What follows is not encrypted: such agents belong on networks
where Ray or Slurm could be used as they are.
"""

from __future__ import annotations

import hashlib
import hmac
import os
import secrets
from pathlib import Path


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
