"""Run by `test_skypilot_task.py` with a Python that has SkyPilot: what does it make of our task?

The task file is read by SkyPilot's own parser, and its optimizer chooses a machine from a catalogue
of two rows in HOME, as a dry run does. No cloud is reached. Prints one JSON object.
"""

import json
import os
import sys
from pathlib import Path
from unittest import mock

CATALOGUE = (
    "InstanceType,AcceleratorName,AcceleratorCount,vCPUs,MemoryGiB,Price,SpotPrice,Region,"
    "AvailabilityZone,GpuInfo,Arch\n"
    "p4de.24xlarge,A100-80GB,8.0,96.0,1152.0,40.9657,16.3,us-east-1,us-east-1a,,x86_64\n"
    "g6e.48xlarge,L40S,8.0,192.0,1536.0,30.1312,9.1,us-east-1,us-east-1a,,x86_64\n"
    "m6i.2xlarge,,,8.0,32.0,0.384,0.15,us-east-1,us-east-1a,,x86_64\n"
)


def main(path: str) -> None:
    folder = Path(os.environ["HOME"]) / ".sky" / "catalogs" / "v8" / "aws"
    folder.mkdir(parents=True)
    (folder / "vms.csv").write_text(CATALOGUE)
    common = folder.parent / "common"
    common.mkdir()
    (common / "accelerators.csv").write_text("AcceleratorName,Clouds\nA100-80GB,AWS\nL40S,AWS\n")
    (common / "metadata.csv").write_text("GPU,MemoryGB,Manufacturer\nA100-80GB,80,NVIDIA\n")
    (folder / "images.csv").write_text("Tag,Region,OS,OSVersion,ImageId,CreationDate\n")

    import sky
    from sky import check, clouds
    from sky.optimizer import Optimizer

    with mock.patch("sky.task.Task.sync_storage_mounts"):
        task = sky.Task.from_yaml(path)
    with sky.Dag() as dag:
        dag.add(task)
    with (
        mock.patch.object(
            check, "get_cached_enabled_clouds_or_refresh", return_value=[clouds.AWS()]
        ),
        mock.patch.object(clouds.AWS, "get_credential_file_mounts", return_value={}),
    ):
        Optimizer.optimize(dag, quiet=True)
    best = task.best_resources
    told = {
        "num_nodes": task.num_nodes,
        "accelerators": sorted(str(one.accelerators) for one in task.resources),
        "mounts": {path: store.name for path, store in task.storage_mounts.items()},
        "chosen": best.instance_type,
        "run": task.run,
    }
    sys.stdout.write("answer: " + json.dumps(told) + "\n")


if __name__ == "__main__":
    main(sys.argv[1])
