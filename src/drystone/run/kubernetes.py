"""From a plan to Kubernetes manifests: a Job, a JobSet or a JobSet under Kueue. Nothing is sent.

One replicated job for each GPU type, because pods of one template ask for one kind of node. Every
pod starts one process for each of its GPUs with torchrun's variables; which ranks those are stands
in DRYSTONE_RANKS, for a plan orders its ranks by stage and not by GPU type. The plan and the script
that starts the ranks are a ConfigMap, checkpoints are a volume that all pods share.

Fields are those of batch/v1, of jobset.x-k8s.io/v1alpha2 and of kueue.x-k8s.io/v1beta2.
"""

from __future__ import annotations

import json
import math
import re
import shlex
from collections.abc import Mapping
from dataclasses import dataclass, field
from enum import StrEnum
from pathlib import Path
from typing import Any, Final

from drystone import __version__
from drystone.describe.catalogue import find_gpu
from drystone.errors import InvalidSpec
from drystone.estimate.parameters import count_model
from drystone.plan.plan import Plan
from drystone.units import GiB

Manifest = dict[str, Any]

DEFAULT_IMAGE: Final = f"drystone:{__version__}"  # which everybody builds: docs/kubernetes.md
LABEL: Final = "drystone/job"
GPU_LABEL: Final = "drystone/gpu"
QUEUE_LABEL: Final = "kueue.x-k8s.io/queue-name"
_RESOURCES: Final = {
    "NVIDIA": "nvidia.com/gpu",
    "AMD": "amd.com/gpu",
    "Intel": "gpu.intel.com/i915",
}
_PORT: Final = 29500  # torchrun's
_MAX_GPUS_OF_A_POD: Final = 8
_KEPT_CHECKPOINTS: Final = 3  # that the runtime keeps
# Weights, both moments of Adam in fp32, and the copy that is being written.
_CHECKPOINT_BYTES_PER_PARAMETER: Final = 12
_PLAN_PATH, _CHECKPOINT_PATH = "/drystone", "/checkpoints"
_NAME: Final = re.compile(r"[a-z0-9]([-a-z0-9]{0,38}[a-z0-9])?")

START_SCRIPT: Final = Path(__file__).with_name("kubernetes_start.sh")


class Target(StrEnum):
    """What runs it."""

    JOB = "job"
    JOBSET = "jobset"
    KUEUE = "kueue"


@dataclass(frozen=True, slots=True, kw_only=True)
class ExportSettings:
    """What a plan does not say."""

    name: str = ""  # of everything that is made; empty: the model's
    image: str = DEFAULT_IMAGE
    namespace: str = ""  # empty: the one that kubectl uses
    command: tuple[str, ...] = ()  # empty: Drystone's own runtime
    num_steps: int = 1000
    data: str = "synthetic"
    gpus_per_pod: int = 0  # 0: the largest divisor of each type's number up to 8
    node_labels: Mapping[str, tuple[str, str]] = field(default_factory=dict)  # by GPU type
    claim: str = ""  # a volume claim that is there; empty: one is made
    queue: str = "drystone"  # Kueue's local queue
    has_queues: bool = True  # whether Kueue's queues and flavours are made too
    max_restarts: int = 10
    grace_seconds: int = 60


@dataclass(frozen=True, slots=True, kw_only=True)
class PodGroup:
    """Equal pods with GPUs of one type."""

    name: str
    gpu: str
    gpus_per_pod: int
    ranks: tuple[tuple[int, ...], ...]  # of each pod
    first_group: int  # pods of other groups before these


def export_plan(plan: Plan, target: Target, settings: ExportSettings) -> list[Manifest]:
    """The manifests, in the order in which they are to be applied."""
    check_runs(plan, settings)
    name = name_of(plan, settings)
    groups = pod_groups(plan, settings.gpus_per_pod)
    shared = [_config_map(name, plan, settings)]
    if not settings.claim:
        shared.append(_claim(name, plan))
    if target is Target.JOB:
        made = [*shared, _service(name), *_jobs(name, plan, groups, settings)]
    else:
        queues = _queues(name, plan, settings) if target is Target.KUEUE else []
        job_set = _job_set(name, plan, groups, settings)
        if target is Target.KUEUE:
            job_set["metadata"]["labels"][QUEUE_LABEL] = settings.queue
            job_set["spec"]["suspend"] = True  # until Kueue admits it
        made = [*queues, *shared, job_set]
    for manifest in made:
        if settings.namespace and manifest["kind"] not in ("ResourceFlavor", "ClusterQueue"):
            manifest["metadata"]["namespace"] = settings.namespace
    return made


def check_runs(plan: Plan, settings: ExportSettings) -> None:
    """Refuse a plan that nothing would execute."""
    if plan.not_executable and not settings.command:
        raise InvalidSpec(
            f"the runtime cannot execute this plan: {plan.not_executable}",
            hint="Give your own script with --command, or save another plan",
        )


def pod_groups(plan: Plan, gpus_per_pod: int = 0) -> list[PodGroup]:
    """Which ranks run in which pods: by GPU type, in the order in which types appear."""
    ranks: dict[str, list[int]] = {}
    rank = 0
    for stage in plan.stages:
        for share in stage.ranks:
            for _ in range(share.count):
                ranks.setdefault(share.gpu, []).append(rank)
                rank += 1
    groups: list[PodGroup] = []
    first = 0
    for gpu, mine in ranks.items():
        size = gpus_per_pod or _largest_divisor(len(mine))
        if len(mine) % size:
            raise InvalidSpec(
                f"{len(mine)} {gpu} cannot be divided into pods of {size} GPUs",
                hint="Choose another --gpus-per-pod, or none",
            )
        pods = tuple(tuple(mine[at : at + size]) for at in range(0, len(mine), size))
        groups.append(
            PodGroup(name=_slug(gpu), gpu=gpu, gpus_per_pod=size, ranks=pods, first_group=first)
        )
        first += len(pods)
    return groups


def _largest_divisor(number: int) -> int:
    return max(size for size in range(1, _MAX_GPUS_OF_A_POD + 1) if number % size == 0)


def _config_map(name: str, plan: Plan, settings: ExportSettings) -> Manifest:
    return {
        "apiVersion": "v1",
        "kind": "ConfigMap",
        "metadata": _metadata(f"{name}-plan", name),
        "data": {
            "plan.json": json.dumps(plan.to_json(), indent=1, allow_nan=False),
            "start.sh": START_SCRIPT.read_text(encoding="utf-8"),
        },
    }


def _claim(name: str, plan: Plan) -> Manifest:
    parameters = count_model(plan.model).total
    size = _CHECKPOINT_BYTES_PER_PARAMETER * parameters * (_KEPT_CHECKPOINTS + 1)
    return {
        "apiVersion": "v1",
        "kind": "PersistentVolumeClaim",
        "metadata": _metadata(f"{name}-checkpoints", name),
        "spec": {
            "accessModes": ["ReadWriteMany"],
            "resources": {"requests": {"storage": f"{max(1, math.ceil(size / GiB))}Gi"}},
        },
    }


def _service(name: str) -> Manifest:
    """Headless, so that pods of all jobs have names in the network before they are ready."""
    return {
        "apiVersion": "v1",
        "kind": "Service",
        "metadata": _metadata(name, name),
        "spec": {
            "clusterIP": "None",
            "selector": {LABEL: name},
            "publishNotReadyAddresses": True,
        },
    }


def _jobs(
    name: str, plan: Plan, groups: list[PodGroup], settings: ExportSettings
) -> list[Manifest]:
    master = f"{name}-{groups[0].name}-0.{name}"
    jobs = []
    for group in groups:
        spec = _job_spec(name, plan, group, settings, master)
        spec["backoffLimit"] = settings.max_restarts
        spec["template"]["spec"]["subdomain"] = name
        jobs.append(
            {
                "apiVersion": "batch/v1",
                "kind": "Job",
                "metadata": _metadata(f"{name}-{group.name}", name),
                "spec": spec,
            }
        )
    return jobs


def _job_set(name: str, plan: Plan, groups: list[PodGroup], settings: ExportSettings) -> Manifest:
    # Pods of a JobSet are <set>-<replicated job>-<job index>-<pod index>.<subdomain>.
    master = f"{name}-{groups[0].name}-0-0.{name}"
    replicated = [
        {
            "name": group.name,
            "replicas": 1,
            "template": {
                "spec": _job_spec(name, plan, group, settings, master) | {"backoffLimit": 0}
            },
        }
        for group in groups
    ]
    return {
        "apiVersion": "jobset.x-k8s.io/v1alpha2",
        "kind": "JobSet",
        "metadata": _metadata(name, name),
        "spec": {
            "network": {
                "enableDNSHostnames": True,
                "subdomain": name,
                "publishNotReadyAddresses": True,
            },
            # A pod that is lost breaks the whole group: all of it starts from the checkpoint.
            "failurePolicy": {"maxRestarts": settings.max_restarts},
            "successPolicy": {"operator": "All"},
            "replicatedJobs": replicated,
        },
    }


def _job_spec(
    name: str, plan: Plan, group: PodGroup, settings: ExportSettings, master: str
) -> Manifest:
    return {
        "completionMode": "Indexed",
        "completions": len(group.ranks),
        "parallelism": len(group.ranks),
        "template": {
            "metadata": {"labels": {LABEL: name, GPU_LABEL: group.name}},
            "spec": {
                "restartPolicy": "Never",
                "terminationGracePeriodSeconds": settings.grace_seconds,
                "nodeSelector": dict([_node_label(group.gpu, settings)]),
                "containers": [_container(plan, group, settings, master)],
                "volumes": [
                    {"name": "plan", "configMap": {"name": f"{name}-plan"}},
                    {
                        "name": "checkpoints",
                        "persistentVolumeClaim": {
                            "claimName": settings.claim or f"{name}-checkpoints"
                        },
                    },
                    # NCCL shares memory between the processes of a pod.
                    {"name": "shared-memory", "emptyDir": {"medium": "Memory"}},
                ],
            },
        },
    }


def _container(plan: Plan, group: PodGroup, settings: ExportSettings, master: str) -> Manifest:
    resource = _RESOURCES.get(find_gpu(group.gpu).vendor, _RESOURCES["NVIDIA"])
    variables = {
        "MASTER_ADDR": master,
        "MASTER_PORT": str(_PORT),
        "WORLD_SIZE": str(plan.num_gpus),
        "DRYSTONE_RANKS": ";".join(" ".join(map(str, ranks)) for ranks in group.ranks),
        "DRYSTONE_FIRST_GROUP": str(group.first_group),
        "DRYSTONE_PLAN": f"{_PLAN_PATH}/plan.json",
        "DRYSTONE_STEPS": str(settings.num_steps),
        "DRYSTONE_CHECKPOINTS": _CHECKPOINT_PATH,
        "DRYSTONE_PROGRESS": f"{_CHECKPOINT_PATH}/progress.jsonl",
        "PYTHONUNBUFFERED": "1",
    }
    return {
        "name": "train",
        "image": settings.image,
        "command": ["sh", f"{_PLAN_PATH}/start.sh", *_command(settings)],
        "env": [{"name": key, "value": value} for key, value in variables.items()],
        "resources": {"limits": {resource: str(group.gpus_per_pod)}},
        "volumeMounts": [
            {"name": "plan", "mountPath": _PLAN_PATH, "readOnly": True},
            {"name": "checkpoints", "mountPath": _CHECKPOINT_PATH},
            {"name": "shared-memory", "mountPath": "/dev/shm"},  # noqa: S108
        ],
    }


def _command(settings: ExportSettings) -> list[str]:
    if settings.command:
        return list(settings.command)
    words = (
        f"python -m drystone.run.train {_PLAN_PATH}/plan.json --steps {settings.num_steps} "
        f"--data {shlex.quote(settings.data)} --checkpoints {_CHECKPOINT_PATH}"
    )
    return shlex.split(words)


def _queues(name: str, plan: Plan, settings: ExportSettings) -> list[Manifest]:
    """A flavour for each GPU type, a queue with as many as the plan takes, and the way into it."""
    if not settings.has_queues:
        return []
    api = "kueue.x-k8s.io/v1beta2"
    flavors, quotas, covered = [], [], set()
    for gpu, count in plan.gpus.items():
        resource = _RESOURCES.get(find_gpu(gpu).vendor, _RESOURCES["NVIDIA"])
        covered.add(resource)
        flavors.append(
            {
                "apiVersion": api,
                "kind": "ResourceFlavor",
                "metadata": {"name": _slug(gpu)},
                "spec": {"nodeLabels": dict([_node_label(gpu, settings)])},
            }
        )
        quotas.append((_slug(gpu), resource, count))
    groups = [
        {
            "coveredResources": [resource],
            "flavors": [
                {"name": flavor, "resources": [{"name": resource, "nominalQuota": count}]}
                for flavor, mine, count in quotas
                if mine == resource
            ],
        }
        for resource in sorted(covered)
    ]
    cluster_queue = {
        "apiVersion": api,
        "kind": "ClusterQueue",
        "metadata": {"name": settings.queue},
        "spec": {"namespaceSelector": {}, "resourceGroups": groups},
    }
    local_queue = {
        "apiVersion": api,
        "kind": "LocalQueue",
        "metadata": _metadata(settings.queue, name),
        "spec": {"clusterQueue": settings.queue},
    }
    return [*flavors, cluster_queue, local_queue]


def _node_label(gpu: str, settings: ExportSettings) -> tuple[str, str]:
    return settings.node_labels.get(gpu, (GPU_LABEL, _slug(gpu)))


def _metadata(name: str, job: str) -> Manifest:
    return {"name": name, "labels": {LABEL: job}}


def name_of(plan: Plan, settings: ExportSettings) -> str:
    """The name of all that is made, checked."""
    name = settings.name or _slug(plan.model.name)[:40].strip("-")
    if not _NAME.fullmatch(name):
        raise InvalidSpec(
            f"{name!r} is not a valid name for Kubernetes",
            hint="Use up to 40 small letters, digits and -, with --name",
        )
    return name


def _slug(text: str) -> str:
    """A name as Kubernetes wants it: small letters, digits and hyphens."""
    return re.sub(r"[^a-z0-9]+", "-", text.lower()).strip("-")
