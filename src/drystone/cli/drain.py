"""`drystone drain`: empty a node, for repair or for good."""

from __future__ import annotations

from typing import Annotated

import typer

from drystone.cli.live import Folder, complete_nodes, connected, quoted


def drain(
    node: Annotated[
        str,
        typer.Argument(
            help="Name of a node, as `drystone cluster` shows it.", autocompletion=complete_nodes
        ),
    ],
    undo: Annotated[bool, typer.Option("--undo", help="Use the node again.")] = False,
    folder: Folder = None,
) -> None:
    """Move jobs away from a node and start none there.

    Jobs on it write a checkpoint, and go on elsewhere when there is room.
    """
    from drystone.cli.output import make_console

    with connected(folder) as client:
        answer = client.post(f"/v1/nodes/{quoted(node)}/{'undrain' if undo else 'drain'}")
    if undo:
        text = f"Node {node} is used again."
    else:
        moved = ", ".join(answer["moved"])
        text = f"Node {node} is drained." + (f" Jobs {moved} leave it." if moved else "")
    make_console(stderr=True).print(text)
