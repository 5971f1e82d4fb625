"""7. Train on uneven devices: two unlike ranks give the losses that one device gives."""

import subprocess
import sys
from pathlib import Path

SCRIPT = str(Path(__file__).resolve().parent / "train_uneven.py")
TORCHRUN = [sys.executable, "-m", "torch.distributed.run", "--nproc-per-node", "2"]


def losses(command: list[str]) -> list[float]:
    """What the script prints of each step."""
    told = subprocess.run(command, capture_output=True, text=True, check=True).stdout
    return [float(line.split()[-1]) for line in told.splitlines() if line.startswith("step")]


two, one = losses([*TORCHRUN, SCRIPT]), losses([sys.executable, SCRIPT])
print(f"{len(two)} steps on two ranks, with 2 and 6 of 8 samples, 75 % and 25 % of the state")
print(f"{len(one)} steps on one device")
most = max(abs(a - b) for a, b in zip(one, two, strict=True))
print(f"loss falls: {two[-1] < two[0]}; losses equal to 3e-4: {most <= 3e-4}")
