"""`drystone run`: one job file, trained here and now, without a service."""

from __future__ import annotations

from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Any

import typer

from drystone.cli.options import AsJson

if TYPE_CHECKING:
    from drystone.describe.files.cluster import ClusterSpec
    from drystone.run.local_run import Followed, LocalPlan


def run(
    file: Annotated[Path, typer.Argument(help="A job file (docs/jobs.md).")],
    devices: Annotated[
        str, typer.Option(help="Emulate these on the processor, e.g. 2xA100-80G,2xT4.")
    ] = "",
    cpu: Annotated[
        int, typer.Option(help="Train on the processor with so many ranks.", min=0, max=64)
    ] = 0,
    folder: Annotated[
        Path | None, typer.Option(help="Where it is kept; none: runs/NAME beside the job file.")
    ] = None,
    out: Annotated[
        Path | None, typer.Option("--out", "-o", help="The export; none: FOLDER/export.")
    ] = None,
    dry_run: Annotated[bool, typer.Option("--dry-run", help="Only show the plan.")] = False,
    as_json: AsJson = False,
) -> None:
    """Train a job here and now, without a service.

    It is planned for the GPUs of this machine, or for its processor where there are none. Ctrl-C
    saves a checkpoint and leaves; the same command goes on from it. At the end the weights are
    exported as a folder that transformers loads.

    With --json: {name, folder, steps, loss, evaluated, ended, export}.
    """
    from drystone.cli.output import make_console, print_json
    from drystone.describe.files.job import load_job
    from drystone.run.control.launches import describe_plan
    from drystone.run.local_run import claimed, export_here, on_processor, plan_run, train_here

    console = make_console(stderr=True)
    job = load_job(file)
    cluster = find_devices(devices, cpu)
    if not devices and not cluster.is_emulated and "CPU" in cluster.gpu_types:
        job = on_processor(job)
    home = (folder or file.resolve().parent / "runs" / job.name).expanduser().absolute()
    console.print(f"Looking at {job.name} ...", style="dim")
    planned = plan_run(job, cluster, home)
    told = describe_plan(planned.plan, planned.seats)
    console.print(f"{job.name}: {planned.num_steps} steps on {told}", style="bold", soft_wrap=True)
    if dry_run:
        return
    with claimed(home, job):
        try:
            followed = _watched(planned, console, train_here)
        except KeyboardInterrupt:
            console.print(f"Saved and left. The same command goes on: {home}", soft_wrap=True)
            raise typer.Exit(130) from None
        exported = export_here(planned, (out or home / "export").expanduser().absolute())
    progress = followed.progress
    if as_json:
        print_json(
            {
                "name": job.name,
                "folder": str(home),
                "steps": progress.step,
                "loss": progress.loss,
                "evaluated": followed.eval_loss,
                "ended": followed.ended,
                "export": str(exported) if exported else None,
            }
        )
        return
    early = f" ({followed.ended})" if followed.ended else ""
    console.print(f"Done after {progress.step} steps{early}.", style="bold green")
    if exported is not None:
        console.print(f"Exported to {exported}", soft_wrap=True)


def find_devices(emulated: str, num_ranks: int) -> ClusterSpec:
    """What to train on: emulated devices, this machine's GPUs, or its processor."""
    from drystone.describe.files.cluster import parse_cluster
    from drystone.errors import InvalidSpec
    from drystone.run.engines.local import find_cluster, local_gpus

    if emulated and num_ranks:
        raise InvalidSpec("--devices and --cpu contradict each other", hint="Keep one")
    if emulated:
        return parse_cluster(_emulated_nodes(emulated), where="--devices")
    if local_gpus() and not num_ranks:
        return find_cluster(None)
    ranks = max(num_ranks, 1)
    kind = f"gpu_types: {{CPU: {{like: T4, memory: {_memory_bytes(ranks)}B}}}}"
    return parse_cluster(f"{kind}\nnodes: [{{gpu: CPU, gpus_per_node: {ranks}}}]")


def _emulated_nodes(text: str) -> str:
    """A cluster file for `2xA100-80G,2xT4`: each type on a node of its own."""
    from drystone.describe.pool import parse_pool

    rows = [
        f"  - {{gpu: {group.gpu.name}, gpus_per_node: {group.count}, "
        f"emulate: {{speed: 0.0005, memory: {group.gpu.usable_bytes}}}}}"
        for group in parse_pool(text).groups
    ]
    return "\n".join(["nodes:", *rows])


def _memory_bytes(num_ranks: int) -> int:
    """Of this machine, for each rank."""
    import os

    whole = os.sysconf("SC_PAGE_SIZE") * os.sysconf("SC_PHYS_PAGES")
    return max(int(whole * 0.9) // num_ranks, 1 << 28)


def _watched(planned: LocalPlan, console: Any, train: Any) -> Followed:
    """One line that says how far it is, on a terminal; elsewhere a line now and then."""
    import time

    last = {"step": -1, "at": 0.0}

    def show(followed: Followed) -> None:
        step, now = followed.progress.step, time.monotonic()
        pause = 0.0 if console.is_terminal else 10.0
        is_last = step == followed.num_steps
        if step == last["step"] or (now - last["at"] < pause and not is_last):
            return
        last.update(step=step, at=now)
        if console.is_terminal:
            end = "\n" if is_last else "\r"
            console.print(_line(followed).ljust(console.width - 1), end=end, soft_wrap=True)
        else:
            console.print(_line(followed), soft_wrap=True)

    found: Followed = train(planned, show)
    return found


def _line(followed: Followed) -> str:
    import math

    from drystone.units import format_seconds

    progress = followed.progress
    if progress.step < 0:
        return "starting"
    parts = [f"step {progress.step}/{followed.num_steps}"]
    if math.isfinite(progress.loss):
        parts.append(f"loss {progress.loss:.4f}")
    if followed.eval_loss is not None:
        parts.append(f"eval {followed.eval_loss:.4f}")
    if followed.tokens_per_second:
        parts.append(f"{followed.tokens_per_second:,.0f} tokens/s")
    if math.isfinite(progress.step_seconds):
        left = (followed.num_steps - progress.step) * progress.step_seconds
        parts.append(f"{format_seconds(left)} left" if left > 0 else "done")
    return ", ".join(parts)
