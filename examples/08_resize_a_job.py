"""8. Resize a job: a node is drained while it trains; it goes on elsewhere, with the same data."""

import subprocess
import time

import drystone
from serving import DRYSTONE, service

with service():
    job = drystone.submit(model="mini-gpt", steps=40, batch=8, sequence=32)
    while not (job.details()["step"] or 0) >= 5:
        time.sleep(0.2)
    node = job.details()["devices"][0][0]
    subprocess.run([*DRYSTONE, "drain", node], check=True, capture_output=True)
    print("state:", job.wait(300))
    told = job.details()
    print("moved:", told["num_starts"] > 1, "steps:", told["step"])
