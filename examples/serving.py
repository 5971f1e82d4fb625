"""A service of one's own while an example runs, on four devices that are emulated."""

import os
import subprocess
import sys
import tempfile
import time
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path

HERE = Path(__file__).resolve().parent
DRYSTONE = [sys.executable, "-m", "drystone"]


@contextmanager
def service() -> Iterator[Path]:
    """`drystone serve` in a temporary folder; at the end nothing is left of it."""
    with tempfile.TemporaryDirectory(prefix="drystone-") as folder:
        os.environ["DRYSTONE_FOLDER"] = folder
        cluster = str(HERE / "cluster_emulated.yaml")
        command = [*DRYSTONE, "serve", "--cluster", cluster, "--end-all"]
        server = subprocess.Popen(command, stderr=subprocess.DEVNULL)
        try:
            while not (Path(folder) / "drystone.sock").exists() and server.poll() is None:
                time.sleep(0.1)
            yield Path(folder)
        finally:
            server.terminate()
            server.wait(60)
