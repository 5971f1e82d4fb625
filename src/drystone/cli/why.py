"""`drystone why`: the reason and the numbers behind what a job has, or has not."""

from __future__ import annotations

from drystone.cli.live import Folder, JobId, connected, quoted
from drystone.cli.options_table import print_options
from drystone.cli.recipe_options import AsJson


def why(job: JobId, folder: Folder = None, as_json: AsJson = False) -> None:
    """Say why a job waits, or why it got what it has.

    The place in the queue, who is in the way, when it should start, what it could choose from, and
    what GPUs are worth to all jobs together.

    With --json: see `Why` in docs/api.md.
    """
    import datetime

    from drystone.cli.output import make_console, print_json, printable

    with connected(folder) as client:
        answer = client.get(f"/v1/jobs/{quoted(job)}/why")
    if as_json:
        print_json(answer)
        return
    console = make_console()
    console.print(printable(answer["sentence"]), style="bold", markup=False)
    if answer["position"]:
        console.print(f"Place {answer['position']} of {answer['num_waiting']} that wait.")
    if answer["expected_start_seconds"]:
        at = datetime.datetime.fromtimestamp(answer["expected_start_seconds"]).astimezone()
        told = f", after {len(answer['ahead'])} of those that wait" if answer["ahead"] else ""
        console.print(f"Expected start: {at:%Y-%m-%d %H:%M:%S}{told}.")
    elif answer["position"]:
        console.print("Expected start: unknown.")
    if answer["faults"]:
        told = ", ".join(f"{kind} {count}x" for kind, count in answer["faults"].items())
        console.print(f"Faults since it last got further: {told}.")
    decision = answer["decision"]
    if decision:
        text = f"Last decision: {decision['decision']}, because {decision['reason']}."
        console.print(printable(text), markup=False)
    if answer["prices"]:
        worth = ", ".join(f"{gpu} {price:.3g}" for gpu, price in answer["prices"].items())
        console.print(f"What one more GPU would be worth to all jobs: {worth}.")
    if answer["options"]:
        console.print()
        print_options("What it can choose from", answer["options"])
