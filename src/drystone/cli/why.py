"""`drystone why`: the reason and the numbers behind what a job has, or has not."""

from __future__ import annotations

from drystone.cli.live import Folder, JobId, connected, quoted
from drystone.cli.options import AsJson
from drystone.cli.quick import show_reasons


def why(job: JobId, folder: Folder = None, as_json: AsJson = False) -> None:
    """Say why a job waits, or why it got what it has.

    The place in the queue, who is in the way, when it should start, what it could choose from, and
    what GPUs are worth to all jobs together.

    With --json: see `Why` in docs/api.md.
    """
    with connected(folder) as client:
        answer = client.get(f"/v1/jobs/{quoted(job)}/why")
    if as_json:
        from drystone.cli.output import print_json

        print_json(answer)
    else:
        show_reasons(answer)
