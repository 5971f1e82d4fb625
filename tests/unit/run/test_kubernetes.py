"""Manifests: valid by the published schemas, every rank once, and a start script that really runs.

batch/v1 and v1 are checked by the schemas that `kubernetes-validate` carries. Kueue and JobSet are
checked by the reduced schemas below: only fields that we write, each as the projects' own types
have it, and nothing else is allowed. The pods inside a JobSet are checked as Jobs, by the full one.
Rules in CEL (immutable fields, `suspend` and queues) are not run.
"""

import os
import signal
import subprocess
import time
from pathlib import Path

import jsonschema
import kubernetes_validate
import pytest
import yaml

from drystone.cli.main import run
from drystone.describe.catalogue import find_gpu
from drystone.describe.machine import default_machine
from drystone.describe.model_source import resolve_model
from drystone.describe.pool import GpuGroup, make_pool
from drystone.describe.recipe import Recipe
from drystone.errors import InvalidSpec
from drystone.plan.plan import load_plan, save_plan
from drystone.plan.uneven.data_parallel import plan_uneven
from drystone.run.kubernetes import (
    START_SCRIPT,
    ExportSettings,
    Target,
    export_plan,
    pod_groups,
)

NAME = {"type": "string", "pattern": "^[a-z0-9]([-a-z0-9]*[a-z0-9])?$", "maxLength": 63}


def closed(properties: dict, *required: str) -> dict:
    return {
        "type": "object",
        "properties": properties,
        "required": list(required),
        "additionalProperties": False,
    }


METADATA = closed(
    {
        "name": NAME,
        "namespace": NAME,
        "labels": {"type": "object", "additionalProperties": {"type": "string"}},
    },
    "name",
)


def resource(api: str, kind: str, spec: dict) -> dict:
    return closed(
        {"apiVersion": {"const": api}, "kind": {"const": kind}, "metadata": METADATA, "spec": spec},
        "apiVersion",
        "kind",
        "metadata",
        "spec",
    )


# github.com/kubernetes-sigs/jobset api/jobset/v1alpha2/jobset_types.go: JobSetSpec, Network,
# FailurePolicy, SuccessPolicy, ReplicatedJob (name and template are required).
JOB_SET = resource(
    "jobset.x-k8s.io/v1alpha2",
    "JobSet",
    closed(
        {
            "suspend": {"type": "boolean"},
            "network": closed(
                {
                    "enableDNSHostnames": {"type": "boolean"},
                    "subdomain": NAME,
                    "publishNotReadyAddresses": {"type": "boolean"},
                }
            ),
            "failurePolicy": closed({"maxRestarts": {"type": "integer"}}),
            "successPolicy": closed({"operator": {"enum": ["All", "Any"]}}, "operator"),
            "replicatedJobs": {
                "type": "array",
                "items": closed(
                    {
                        "name": NAME,
                        "replicas": {"type": "integer"},
                        "template": closed({"spec": {"type": "object"}}, "spec"),
                    },
                    "name",
                    "template",
                ),
            },
        }
    ),
)
KUEUE = "kueue.x-k8s.io/v1beta2"
# github.com/kubernetes-sigs/kueue apis/kueue/v1beta2/resourceflavor_types.go: ResourceFlavorSpec.
FLAVOR = resource(
    KUEUE,
    "ResourceFlavor",
    closed(
        {
            "nodeLabels": {
                "type": "object",
                "maxProperties": 8,
                "additionalProperties": {"type": "string"},
            }
        }
    ),
)
# apis/kueue/v1beta2/clusterqueue_types.go: ClusterQueueSpec, ResourceGroup, FlavorQuotas,
# ResourceQuota (a quantity is an integer or a string).
CLUSTER_QUEUE = resource(
    KUEUE,
    "ClusterQueue",
    closed(
        {
            "namespaceSelector": {"type": "object"},
            "resourceGroups": {
                "type": "array",
                "maxItems": 16,
                "items": closed(
                    {
                        "coveredResources": {
                            "type": "array",
                            "minItems": 1,
                            "maxItems": 64,
                            "items": {"type": "string"},
                        },
                        "flavors": {
                            "type": "array",
                            "minItems": 1,
                            "maxItems": 64,
                            "items": closed(
                                {
                                    "name": NAME,
                                    "resources": {
                                        "type": "array",
                                        "minItems": 1,
                                        "items": closed(
                                            {
                                                "name": {"type": "string"},
                                                "nominalQuota": {"type": ["integer", "string"]},
                                            },
                                            "name",
                                            "nominalQuota",
                                        ),
                                    },
                                },
                                "name",
                                "resources",
                            ),
                        },
                    },
                    "coveredResources",
                    "flavors",
                ),
            },
        }
    ),
)
# apis/kueue/v1beta2/localqueue_types.go: LocalQueueSpec.
LOCAL_QUEUE = resource(KUEUE, "LocalQueue", closed({"clusterQueue": NAME}))
REDUCED = {
    "JobSet": JOB_SET,
    "ResourceFlavor": FLAVOR,
    "ClusterQueue": CLUSTER_QUEUE,
    "LocalQueue": LOCAL_QUEUE,
}


@pytest.fixture(scope="module")
def plan_file(tmp_path_factory) -> Path:
    path = tmp_path_factory.mktemp("plan") / "plan.json"
    gpus = [("A100-80G", 4), ("V100-32G", 2)]
    pool = make_pool([GpuGroup(machine=default_machine(find_gpu(g), n), count=n) for g, n in gpus])
    plan = plan_uneven(resolve_model("gpt2"), Recipe(seq_len=1024, global_batch=32), pool)
    save_plan(plan, path)
    return path


def check(manifest: dict) -> None:
    """Raise if a manifest is none."""
    if manifest["kind"] not in REDUCED:
        kubernetes_validate.validate(manifest, "1.34", strict=True)
        return
    jsonschema.validate(manifest, REDUCED[manifest["kind"]])
    for job in manifest["spec"].get("replicatedJobs", ()):
        whole = {"apiVersion": "batch/v1", "kind": "Job", "metadata": {"name": job["name"]}}
        kubernetes_validate.validate(whole | job["template"], "1.34", strict=True)


def pods_of(manifests: list[dict]) -> list[tuple[dict, dict]]:
    """(Job spec, its only container)."""
    specs = []
    for one in manifests:
        if one["kind"] == "Job":
            specs.append(one["spec"])
        elif one["kind"] == "JobSet":
            specs += [job["template"]["spec"] for job in one["spec"]["replicatedJobs"]]
    return [(spec, spec["template"]["spec"]["containers"][0]) for spec in specs]


@pytest.mark.parametrize("target", list(Target))
@pytest.mark.parametrize(
    "settings",
    [
        ExportSettings(),
        ExportSettings(
            name="mine", namespace="team-a", command=("python", "train.py"), gpus_per_pod=2,
            claim="disk", node_labels={"A100-80GB-SXM": ("nvidia.com/gpu.product", "NVIDIA-A100")},
        ),
    ],
    ids=["plain", "own"],
)  # fmt: skip
def test_manifests_are_valid_by_the_published_schemas(plan_file, target, settings):
    manifests = export_plan(load_plan(plan_file), target, settings)
    for one in yaml.safe_load_all(yaml.safe_dump_all(manifests)):
        check(one)


@pytest.mark.parametrize(
    ("kind", "change"),
    [
        ("JobSet", lambda one: one["spec"].update(replicatedJob=[])),
        ("JobSet", lambda one: one["spec"]["successPolicy"].update(operator="Most")),
        ("ClusterQueue", lambda one: one["spec"]["resourceGroups"][0].pop("flavors")),
        ("ConfigMap", lambda one: one.update(dota={})),
        ("JobSet", lambda one: one["spec"]["replicatedJobs"][0]["template"]["spec"].update(
            completion=1)),
    ],
)  # fmt: skip
def test_the_schemas_refuse_what_is_wrong(plan_file, kind, change):
    manifests = export_plan(load_plan(plan_file), Target.KUEUE, ExportSettings())
    wrong = next(one for one in manifests if one["kind"] == kind)
    change(wrong)
    with pytest.raises((jsonschema.ValidationError, kubernetes_validate.ValidationError)):
        check(wrong)


@pytest.mark.parametrize("size", [0, 1, 2])
@pytest.mark.parametrize("target", [Target.JOB, Target.JOBSET])
def test_every_rank_runs_once_on_its_type(plan_file, target, size):
    plan = load_plan(plan_file)
    settings = ExportSettings(gpus_per_pod=size)
    order = [s.gpu for stage in plan.stages for s in stage.ranks for _ in range(s.count)]
    seen = []
    for spec, container in pods_of(export_plan(plan, target, settings)):
        values = {one["name"]: one["value"] for one in container["env"]}
        assert values["WORLD_SIZE"] == "6"
        pods = values["DRYSTONE_RANKS"].split(";")
        assert len(pods) == spec["completions"] == spec["parallelism"]
        gpu = spec["template"]["spec"]["nodeSelector"]["drystone/gpu"]
        for pod in pods:
            ranks = [int(one) for one in pod.split()]
            assert container["resources"]["limits"] == {"nvidia.com/gpu": str(len(ranks))}
            assert {order[rank].lower() for rank in ranks} == {gpu}
            seen += ranks
    assert sorted(seen) == list(range(6))


def test_rank_0_is_where_the_others_look_for_it(plan_file):
    plan = load_plan(plan_file)
    first = pod_groups(plan)[0]
    assert first.ranks[0][0] == 0
    job = pods_of(export_plan(plan, Target.JOB, ExportSettings(name="n")))[0][1]
    assert job["env"][0] == {"name": "MASTER_ADDR", "value": f"n-{first.name}-0.n"}
    job_set = pods_of(export_plan(plan, Target.JOBSET, ExportSettings(name="n")))[0][1]
    assert job_set["env"][0] == {"name": "MASTER_ADDR", "value": f"n-{first.name}-0-0.n"}


def test_the_plan_comes_back_from_the_config_map(plan_file, tmp_path):
    plan = load_plan(plan_file)
    found = export_plan(plan, Target.JOBSET, ExportSettings())[0]["data"]["plan.json"]
    (tmp_path / "plan.json").write_text(found)
    assert load_plan(tmp_path / "plan.json") == plan


def test_what_cannot_be_is_refused(plan_file):
    plan = load_plan(plan_file)
    with pytest.raises(InvalidSpec, match="cannot be divided"):
        export_plan(plan, Target.JOB, ExportSettings(gpus_per_pod=3))
    with pytest.raises(InvalidSpec, match="valid name"):
        export_plan(plan, Target.JOB, ExportSettings(name="Not_A_Name"))


def start(tmp_path: Path, command: str, index: int = 0) -> subprocess.Popen:
    values = {
        "DRYSTONE_RANKS": "0 1;4 5 3", "DRYSTONE_FIRST_GROUP": "2",
        "JOB_COMPLETION_INDEX": str(index),
    }  # fmt: skip
    return subprocess.Popen(
        ["sh", str(START_SCRIPT), "sh", "-c", command], env={**os.environ, **values}, cwd=tmp_path,
        stdout=subprocess.PIPE, text=True, start_new_session=True,
    )  # fmt: skip


def test_the_script_starts_the_ranks_of_its_pod(tmp_path):
    ended = start(tmp_path, "echo $RANK $LOCAL_RANK $LOCAL_WORLD_SIZE $GROUP_RANK", index=1)
    out, _ = ended.communicate(timeout=30)
    assert ended.returncode == 0
    assert sorted(out.splitlines()) == ["3 2 3 3", "4 0 3 3", "5 1 3 3"]


def test_a_rank_that_fails_ends_the_pod_with_its_code(tmp_path):
    ended = start(tmp_path, "if [ $RANK = 1 ]; then exit 7; fi; exec sleep 600")
    ended.communicate(timeout=120)  # the others were asked to leave
    assert ended.returncode == 7


def test_the_end_of_a_pod_reaches_every_rank(tmp_path):
    pod = start(
        tmp_path,
        'trap "touch left-$RANK; exit 0" TERM; touch here-$RANK; while :; do sleep 0.1; done',
    )
    deadline = time.monotonic() + 30
    while len(list(tmp_path.glob("here-*"))) < 2:
        assert time.monotonic() < deadline
        time.sleep(0.02)
    os.kill(pod.pid, signal.SIGTERM)
    pod.communicate(timeout=30)
    assert pod.returncode == 0
    assert sorted(one.name for one in tmp_path.glob("left-*")) == ["left-0", "left-1"]


def test_the_command_writes_what_kubectl_reads(plan_file, tmp_path, capsys):
    out = tmp_path / "k.yaml"
    assert run(["export", str(plan_file), "--to", "kueue", "-o", str(out), "--name", "it"]) == 0
    kinds = [one["kind"] for one in yaml.safe_load_all(out.read_text())]
    assert kinds == [
        "ResourceFlavor", "ResourceFlavor", "ClusterQueue", "LocalQueue", "ConfigMap",
        "PersistentVolumeClaim", "JobSet",
    ]  # fmt: skip
    assert "kubectl apply" in capsys.readouterr().err
    assert run(["export", str(plan_file), "--to", "nomad"]) == 2
    assert run(["export", str(plan_file), "--node-label", "A100"]) == 2


def test_a_plan_that_the_runtime_cannot_execute_needs_a_script(plan_file, tmp_path):
    from dataclasses import replace

    plan = replace(load_plan(plan_file), not_executable="experts")
    save_plan(plan, tmp_path / "plan.json")
    assert run(["export", str(tmp_path / "plan.json")]) == 2
    assert run(["export", str(tmp_path / "plan.json"), "--command", "python train.py"]) == 0
