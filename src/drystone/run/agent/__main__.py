"""`python -m drystone.run.agent FOLDER NODE [IDLE_SECONDS]`: the agent of one node."""

from __future__ import annotations

import asyncio
import fcntl
import os
import signal
import sys
from pathlib import Path

from drystone.run.agent.server import Agent, listen, serve


def main(arguments: list[str]) -> int:
    """Serve until asked to leave, or until nobody needs us any more."""
    folder, node = Path(arguments[0]), arguments[1]
    idle_seconds = float(arguments[2]) if len(arguments) > 2 else 600.0
    folder.mkdir(parents=True, exist_ok=True)
    if os.fork():
        os._exit(0)  # whoever started us need not wait for us, nor bury us
    os.setsid()
    # One agent a node: a second one would take the socket of the first.
    lock = os.open(folder / "agent.lock", os.O_RDWR | os.O_CREAT, 0o600)
    try:
        fcntl.flock(lock, fcntl.LOCK_EX | fcntl.LOCK_NB)
    except BlockingIOError:
        return 0
    agent = Agent(folder, node=node, idle_seconds=idle_seconds)

    def leave(_: int, __: object) -> None:
        agent.is_leaving = True

    for number in (signal.SIGTERM, signal.SIGINT):
        signal.signal(number, leave)
    asyncio.run(serve(agent, listen(folder)))
    return 0


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))
