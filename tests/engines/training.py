"""Real training of a tiny model on an engine: submit it, and read what the runtime reports."""

import json

from under_test import LiveSystem

from drystone.describe.files.job import make_job


def train(system: LiveSystem, *, least: int, steps: int, checkpoint_every: int) -> str:
    """A tiny model, on so many GPUs at least."""
    table = {
        "model": "mini-gpt",
        "train": {
            "steps": steps, "batch": 12, "sequence": 16, "checkpoint_every": checkpoint_every,
        },
        "gpus": {"min": least},
    }  # fmt: skip
    return system.controller.submit(make_job(table, folder=system.folder))[0]


def reports(system: LiveSystem, job_id: str) -> list[dict]:
    """Every report of Drystone's own runtime, launch after launch."""
    files = sorted(
        system.folder.glob(f"agents/*/launches/{job_id}.*/rank-0.out"),
        key=lambda path: int(path.parent.name.split(".")[1]),
    )
    return [json.loads(line) for file in files for line in file.read_text().splitlines()]


def losses(system: LiveSystem, job_id: str) -> dict[int, list[float]]:
    """By step, what every launch that took it reported."""
    found: dict[int, list[float]] = {}
    for report in reports(system, job_id):
        if report["event"] == "step":
            found.setdefault(report["step"], []).append(report["loss"])
    return found
