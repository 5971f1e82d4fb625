"""Scripts of other frameworks leave on two ranks, and go on with one where they stopped."""

import json
import os
import signal
import socket
import subprocess
import sys
import time
from pathlib import Path

import pytest

FOLDER = Path(__file__).resolve().parents[1] / "examples" / "scripts"
NEEDS = {
    "titan_style": ("torch", "transformers"),
    "hf_trainer": ("torch", "transformers", "accelerate"),
    "accelerate_loop": ("torch", "transformers", "accelerate"),
}


def start(script: str, folder: Path, num_ranks: int, num_steps: int) -> list[subprocess.Popen]:
    with socket.socket() as probe:
        probe.bind(("127.0.0.1", 0))
        port = probe.getsockname()[1]
    common = os.environ | {
        "OMP_NUM_THREADS": "1",
        "MASTER_ADDR": "127.0.0.1",
        "MASTER_PORT": str(port),
        "WORLD_SIZE": str(num_ranks),
        "LOCAL_WORLD_SIZE": str(num_ranks),
        "DRYSTONE_STEPS": str(num_steps),
        "DRYSTONE_CHECKPOINTS": str(folder / "saved"),
        "DRYSTONE_PROGRESS": str(folder / "progress.jsonl"),
    }
    with (folder / "log").open("ab") as log:
        return [
            subprocess.Popen(
                [sys.executable, f"{script}.py"],
                cwd=FOLDER,
                env=common | {"RANK": str(rank), "LOCAL_RANK": str(rank)},
                stdout=log,
                stderr=log,
            )
            for rank in range(num_ranks)
        ]


def reports(folder: Path) -> list[dict]:
    path = folder / "progress.jsonl"
    return [json.loads(line) for line in path.read_text().splitlines()] if path.exists() else []


def wait(processes: list[subprocess.Popen], folder: Path) -> None:
    codes = [process.wait(timeout=120) for process in processes]
    assert not any(codes), (folder / "log").read_text()[-3000:]


@pytest.mark.slow
@pytest.mark.torch
@pytest.mark.parametrize("script", sorted(NEEDS))
def test_a_script_is_drained_on_two_ranks_and_goes_on_with_one(script: str, tmp_path: Path):
    for package in NEEDS[script]:
        pytest.importorskip(package, reason=f"examples/scripts/{script}.py needs {package}")
    processes = start(script, tmp_path, num_ranks=2, num_steps=5000)
    try:
        while len(reports(tmp_path)) < 6 and all(process.poll() is None for process in processes):
            time.sleep(0.1)
        processes[1].send_signal(signal.SIGTERM)  # one rank alone hears it; all leave together
        wait(processes, tmp_path)
        left = reports(tmp_path)
        last_step = max(report["step"] for report in left)
        assert left[-1] == {"event": "checkpoint", "step": last_step}
        assert last_step < 5000

        processes = start(script, tmp_path, num_ranks=1, num_steps=last_step + 3)
        wait(processes, tmp_path)
    finally:
        for process in processes:
            process.kill()
    later = reports(tmp_path)[len(left) :]
    steps = [report for report in later if report["event"] == "step"]
    assert [report["step"] for report in steps] == [last_step + 1, last_step + 2, last_step + 3]
    losses = [report["loss"] for report in left if "loss" in report]
    assert min(report["loss"] for report in steps if "loss" in report) < losses[0]
