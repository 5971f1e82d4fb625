"""SkyPilot as a provider, against a stand-in for its module: names and signatures as in 0.14.1.

No cloud was reached: what a real SkyPilot does beyond its documented API is not tested here. Where
DRYSTONE_SKY_PYTHON names a Python that has SkyPilot 0.14.1 and msgspec (SkyPilot holds click and
uvicorn below what this project has), its own package is asked, too.
"""

import enum
import json
import os
import subprocess
import time
import types
from dataclasses import dataclass
from pathlib import Path

import pytest

from drystone.describe.market import Offer
from drystone.errors import DrystoneError, InvalidSpec
from drystone.run.renting.provider import ProviderTrouble, Stage
from drystone.run.renting.skypilot import SkyPilot

OFFER = Offer(
    name="a100", gpu="A100-80GB-SXM", num_gpus=8, price_dollars_per_hour=20.0,
    instance="p4d.24xlarge", infra="aws/us-east-1", is_spot=True,
)  # fmt: skip


class ClusterStatus(enum.Enum):
    PENDING = "PENDING"
    INIT = "INIT"
    UP = "UP"
    STOPPED = "STOPPED"


class StatusRefreshMode(enum.Enum):
    NONE = "NONE"
    AUTO = "AUTO"
    FORCE = "FORCE"


class ResourcesUnavailableError(Exception):
    def __init__(self, message, no_failover=False, failover_history=None):
        super().__init__(message)


class ClusterDoesNotExist(ValueError):
    pass


@dataclass
class Resources:
    infra: str | None = None
    instance_type: str | None = None
    use_spot: bool | None = None

    def get_cost(self, seconds):
        return (12.5 if self.use_spot else 22.0) * seconds / 3600


@dataclass
class Task:
    name: str | None = None
    run: str | None = None

    def set_resources(self, resources):
        self.resources = resources


@dataclass
class StatusResponse:
    name: str
    launched_at: int
    handle: object
    status: ClusterStatus
    init_kind: str | None = None
    init_status_reason: str | None = None


class FakeSky(types.ModuleType):
    """Requests are answered when they are asked for with `get`, as SkyPilot's are."""

    ClusterStatus, StatusRefreshMode = ClusterStatus, StatusRefreshMode
    Resources, Task = Resources, Task
    exceptions = types.SimpleNamespace(
        ResourcesUnavailableError=ResourcesUnavailableError,
        ClusterDoesNotExist=ClusterDoesNotExist,
    )

    def __init__(self):
        super().__init__("sky")
        self.clusters, self.tasks, self.ended, self.requests = {}, {}, {}, []
        self.has_none = self.is_down = False

    def launch(self, task, cluster_name=None, retry_until_up=False,
               idle_minutes_to_autostop=None, down=False):  # fmt: skip
        def answer():
            if self.has_none:
                raise ResourcesUnavailableError("no p4d.24xlarge in us-east-1\nmore")
            self.tasks.setdefault(cluster_name, []).append(task)
            handle = types.SimpleNamespace(launched_resources=task.resources)
            self.clusters.setdefault(
                cluster_name, StatusResponse(cluster_name, 1000, handle, ClusterStatus.UP)
            )
            return 1, handle

        return self._request(answer)

    def status(self, cluster_names=None, refresh=StatusRefreshMode.NONE, all_users=False):
        return self._request(lambda: list(self.clusters.values()))

    def down(self, cluster_name, purge=False):
        def answer():
            if cluster_name not in self.clusters:
                raise ClusterDoesNotExist(f"Cluster {cluster_name!r} does not exist.")
            self.ended[cluster_name] = self.clusters.pop(cluster_name)

        return self._request(answer)

    def cost_report(self, days=None):
        return self._request(
            lambda: [{"name": name, "total_cost": 1.25, "duration": 360} for name in self.ended]
        )

    def get(self, request_id):
        return self.requests[request_id]()

    def _request(self, answer):
        if self.is_down:
            raise RuntimeError("Could not connect to SkyPilot API server")
        self.requests.append(answer)
        return len(self.requests) - 1


@pytest.fixture
def sky():
    return FakeSky()


@pytest.fixture
def provider(sky):
    return SkyPilot((OFFER,), ray_address="10.0.0.1:6379", sky=sky)


def until(condition):
    deadline = time.monotonic() + 30
    while not (found := condition()):
        assert time.monotonic() < deadline
        time.sleep(0.01)
    return found


def test_a_machine_is_launched_by_its_token_joins_ray_and_is_taken_down(provider, sky):
    provider.rent("f-000003", OFFER)
    provider.rent("f-000003", OFFER)
    (one,) = until(lambda: provider.status("f-"))
    assert (one.token, one.stage, one.since_seconds) == ("f-000003", Stage.RUNNING, 1000.0)
    assert one.price_dollars_per_hour == 12.5  # what the cloud bills, not what the market file says
    (task,) = sky.tasks["f-000003"]
    assert task.resources == Resources("aws/us-east-1", "p4d.24xlarge", True)
    assert "--address=10.0.0.1:6379" in task.run
    assert "drystone-node=rented-a100-0003,drystone-gpu=A100-80GB-SXM" in task.run
    provider.release("f-000003")
    provider.release("f-000003")
    (one,) = provider.status("f-")
    assert (one.stage, one.billed_micro_dollars) == (Stage.ENDED, 1_250_000)


def test_another_controller_with_the_same_token_gets_the_same_machine(provider, sky):
    provider.rent("f-000000", OFFER)
    until(lambda: provider.status("f-"))
    again = SkyPilot((OFFER,), ray_address="10.0.0.1:6379", sky=sky)
    again.rent("f-000000", OFFER)
    until(lambda: len(sky.tasks["f-000000"]) == 2)  # launched on the cluster that is there
    assert len(again.status("f-")) == 1


def test_a_type_that_is_not_to_be_had_fails_with_the_clouds_words(provider, sky):
    sky.has_none = True
    provider.rent("f-000000", OFFER)
    (one,) = until(lambda: provider.status("f-"))
    assert (one.stage, one.reason) == (Stage.FAILED, "no p4d.24xlarge in us-east-1")


@pytest.mark.parametrize(
    ("status", "kind", "stage"),
    [
        (ClusterStatus.INIT, "launching", Stage.STARTING),
        (ClusterStatus.INIT, "unhealthy", Stage.ENDED),
        (ClusterStatus.STOPPED, None, Stage.ENDED),
    ],
)
def test_clusters_stand_as_sky_says(provider, sky, status, kind, stage):
    handle = types.SimpleNamespace(launched_resources=Resources(use_spot=True))
    sky.clusters["f-000000"] = StatusResponse("f-000000", 5, handle, status, kind, "node is gone")
    sky.clusters["other"] = StatusResponse("other", 5, handle, ClusterStatus.UP)
    (one,) = provider.status("f-")
    assert one.stage is stage


def test_trouble_is_told_as_trouble(provider, sky):
    sky.is_down = True
    with pytest.raises(ProviderTrouble, match="Could not connect"):
        provider.status("f-")
    with pytest.raises(ProviderTrouble):
        provider.release("f-000000")


def test_quotes_are_the_catalogues(provider):
    assert provider.quote() == {"a100": 12.5}


def test_what_is_missing_is_named():
    with pytest.raises(InvalidSpec, match="what to rent where"):
        SkyPilot((Offer(name="x", gpu="T4", num_gpus=1, price_dollars_per_hour=1.0),),
                 ray_address="h:1", sky=FakeSky())  # fmt: skip
    with pytest.raises(InvalidSpec, match="which Ray cluster"):
        SkyPilot((OFFER,), ray_address="", sky=FakeSky())


def test_without_sky_the_extra_is_named(monkeypatch):
    monkeypatch.setitem(__import__("sys").modules, "sky", None)
    with pytest.raises(DrystoneError, match="needs SkyPilot"):
        SkyPilot((OFFER,), ray_address="h:1")


def test_a_cluster_that_is_pending_is_on_its_way():
    provider = SkyPilot((OFFER,), ray_address="10.0.0.1:6379", sky=FakeSky())
    record = StatusResponse("drystone-aa-bb-000001", 0, None, ClusterStatus.PENDING)

    assert provider._rental(record).stage is Stage.STARTING


@pytest.mark.slow
@pytest.mark.skipif(
    not os.environ.get("DRYSTONE_SKY_PYTHON"), reason="DRYSTONE_SKY_PYTHON names no SkyPilot"
)
def test_skypilot_itself_has_what_is_called_and_quotes_its_catalogue(tmp_path):
    here = Path(__file__).parent
    found = subprocess.run(
        [os.environ["DRYSTONE_SKY_PYTHON"], str(here / "real_skypilot.py")],
        env={
            **os.environ,
            "HOME": str(tmp_path),
            "PYTHONPATH": str(here.parents[3] / "src"),
            "SKYPILOT_DISABLE_USAGE_COLLECTION": "1",
        },
        capture_output=True,
        text=True,
        timeout=600,
        check=True,
    )
    told = json.loads(found.stdout.rpartition("answer: ")[2])

    assert told["quote"] == {"on-demand": 32.7726, "spot": 9.8318}
    assert set(told["statuses"]) <= {"PENDING", "INIT", "UP", "AUTOSTOPPING", "STOPPED"}
    assert told["has_missing_error"]
    assert "p99.huge" in told["trouble"]
