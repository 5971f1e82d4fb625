"""`python -m drystone.run.engines.agent FOLDER NODE`: the agent of one node.

    python -m drystone.run.engines.agent FOLDER NODE [SECONDS] [--listen HOST --secret FILE]
        [--life PID]

With `--listen` it answers over the network, to those who know the secret.
With `--life` it ends with that process, and takes everything along that it started.
"""

from __future__ import annotations

import argparse
import asyncio
import fcntl
import os
import signal
import sys
from pathlib import Path

from drystone.run.engines.agent.keeper import adopt_orphans, hide_environment
from drystone.run.engines.agent.server import Agent, listen, listen_remote, serve


def main(arguments: list[str]) -> int:
    """Serve until asked to leave, or until nobody needs us any more."""
    given = _parse(arguments)
    folder: Path = given.folder
    folder.mkdir(parents=True, exist_ok=True)
    secret = given.secret.read_text(encoding="ascii").strip() if given.listen else ""
    if os.fork():
        os._exit(0)  # whoever started us need not wait for us, nor bury us
    os.setsid()
    adopt_orphans()
    hide_environment()
    # One agent a node: a second one would take the socket of the first.
    lock = os.open(folder / "agent.lock", os.O_RDWR | os.O_CREAT, 0o600)
    try:
        fcntl.flock(lock, fcntl.LOCK_EX | fcntl.LOCK_NB)
    except BlockingIOError:
        return 0
    agent = Agent(
        folder,
        node=given.node,
        idle_seconds=given.idle_seconds,
        host=given.listen,
        life=given.life,
    )

    def leave(_: int, __: object) -> None:
        agent.is_leaving = True

    for number in (signal.SIGTERM, signal.SIGINT):
        signal.signal(number, leave)
    listener = listen_remote(folder, given.listen) if given.listen else listen(folder)
    asyncio.run(serve(agent, listener, secret))
    return 0


def _parse(arguments: list[str]) -> argparse.Namespace:
    parser = argparse.ArgumentParser(prog="drystone.run.engines.agent")
    parser.add_argument("folder", type=Path)
    parser.add_argument("node")
    parser.add_argument("idle_seconds", type=float, nargs="?", default=600.0)
    parser.add_argument("--listen", default="", metavar="HOST")
    parser.add_argument("--secret", type=Path)
    parser.add_argument("--life", type=int, default=0, metavar="PID")
    given = parser.parse_args(arguments)
    if given.listen and given.secret is None:
        parser.error("--listen needs --secret")
    return given


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))
