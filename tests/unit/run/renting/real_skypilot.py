"""Run by `test_skypilot.py` with a Python that has SkyPilot itself: does our provider fit it?

No cloud is reached: the catalogue is a file of two rows in HOME, and launches are only bound to
the signatures that SkyPilot has. Prints one JSON object.
"""

import inspect
import json
import os
import sys
from pathlib import Path

CATALOGUE = (
    "InstanceType,AcceleratorName,AcceleratorCount,vCPUs,MemoryGiB,Price,SpotPrice,Region,"
    "AvailabilityZone,GpuInfo,Arch\n"
    "p4d.24xlarge,A100,8.0,96.0,1152.0,32.7726,9.8318,us-east-1,us-east-1a,,x86_64\n"
    "m6i.2xlarge,,,8.0,32.0,0.384,0.15,us-east-1,us-east-1a,,x86_64\n"
)


def main() -> None:
    folder = Path(os.environ["HOME"]) / ".sky" / "catalogs" / "v8" / "aws"
    folder.mkdir(parents=True)
    (folder / "vms.csv").write_text(CATALOGUE)

    import sky

    from drystone.describe.market import Offer
    from drystone.run.renting.provider import ProviderTrouble
    from drystone.run.renting.skypilot import SkyPilot

    offers = [
        Offer(
            name=name,
            gpu="A100-40GB-SXM",
            num_gpus=8,
            price_dollars_per_hour=1.0,
            instance="p4d.24xlarge",
            infra="aws/us-east-1",
            is_spot=name == "spot",
        )
        for name in ("on-demand", "spot")
    ]
    provider = SkyPilot(offers, ray_address="10.0.0.1:6379")
    quote = provider.quote()
    task = sky.Task(name="drystone-aa-bb-000001", run=provider._start_script("d-000001", offers[0]))
    task.set_resources(provider._resources(offers[0]))
    inspect.signature(sky.launch).bind(task, cluster_name="d-000001", retry_until_up=False)
    inspect.signature(sky.status).bind(refresh=sky.StatusRefreshMode.AUTO)
    inspect.signature(sky.cost_report).bind(days=30)
    inspect.signature(sky.down).bind("d-000001")
    inspect.signature(sky.get).bind("request")
    wrong = Offer(
        name="wrong",
        gpu="A100-40GB-SXM",
        num_gpus=8,
        price_dollars_per_hour=1.0,
        instance="p99.huge",
        infra="aws/us-east-1",
    )
    try:
        SkyPilot([wrong], ray_address="10.0.0.1:6379").quote()
        trouble = ""
    except ProviderTrouble as error:
        trouble = error.message
    told = {
        "version": sky.__version__,
        "quote": quote,
        "statuses": sorted(status.name for status in sky.ClusterStatus),
        "has_missing_error": issubclass(sky.exceptions.ClusterDoesNotExist, Exception),
        "trouble": trouble,
    }
    sys.stdout.write("\nanswer: " + json.dumps(told) + "\n")


main()
