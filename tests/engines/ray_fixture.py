"""A real Ray cluster on this machine: a raylet for each node, each with an address of its own.

Everything listens on loopback (127.0.0.2 and on). One cluster a process: `shared_cluster()`. It is
never ended by `ray stop`, which would end every Ray on the machine.
"""

import atexit
import os
import shutil
import signal
import tempfile
import time
import warnings
from contextlib import contextmanager, suppress
from dataclasses import dataclass
from pathlib import Path
from unittest import mock

# Ray reads these when it is imported, and its daemons inherit them.
os.environ |= {
    "RAY_USAGE_STATS_ENABLED": "0",
    "RAY_ACCEL_ENV_VAR_OVERRIDE_ON_ZERO": "0",  # without it Ray warns about what it will do one day
    "RAY_DISABLE_IMPORT_WARNING": "1",
    "RAY_DEDUP_LOGS_SKIP_REGEX": ".",  # nor does it print what dead raylets had to say
    "RAY_worker_niceness": "0",  # on a busy machine the others would get all of it
}
# A killed raylet is noticed within a second or two, not after fifteen.
HEALTH = {
    "health_check_initial_delay_ms": 0,
    "health_check_period_ms": 500,
    "health_check_timeout_ms": 2000,
    "health_check_failure_threshold": 3,
}
_START_SECONDS = 60.0
_STORE_BYTES = 80 * 2**20  # the least that Ray takes


@dataclass(frozen=True)
class RayNodeSpec:
    """A node as it is started: its name, GPU type and number."""

    name: str
    gpu: str
    num_gpus: int


NODES = (
    RayNodeSpec("wide", "A100", 2),
    RayNodeSpec("small1", "T4", 1),
    RayNodeSpec("small2", "T4", 1),
    RayNodeSpec("other", "V100", 1),
)


class RayCluster:
    """A head without GPUs, and nodes that can be killed, hung and started again."""

    def __init__(self, nodes: tuple[RayNodeSpec, ...] = NODES) -> None:
        import ray
        from ray.cluster_utils import Cluster

        # Sockets live under it, and a socket's path is short.
        self._folder = Path(tempfile.mkdtemp(prefix="dsray-"))
        self._specs = {one.name: one for one in nodes}
        self._nodes = {}
        self._stopped: dict[str, list[int]] = {}
        self._num_added = 0
        with warnings.catch_warnings(), _patient():
            warnings.simplefilter("ignore")
            head = {
                "num_cpus": 0,
                "num_gpus": 0,
                "include_dashboard": False,
                "node_ip_address": "127.0.0.2",
                "temp_dir": str(self._folder),
                "object_store_memory": _STORE_BYTES,
                "_system_config": HEALTH,
            }
            # Ray writes down which cluster is the current one where RAY_TMPDIR says, and takes it
            # that the folder is there: without this in /tmp/ray, which is not ours to write to.
            (self._folder / "ray").mkdir()
            with mock.patch.dict(os.environ, {"RAY_TMPDIR": str(self._folder)}):
                self._cluster = _retried(lambda: Cluster(initialize_head=True, head_node_args=head))
            for one in nodes:
                self.add(one)
            # Controllers of this process share one driver: joining takes Ray seconds.
            ray.init(
                address=self.address, namespace="drystone", log_to_driver=False,
                configure_logging=False, _node_ip_address="127.0.0.2",
            )  # fmt: skip
        atexit.register(self.close)

    @property
    def address(self) -> str:
        return self._cluster.address

    def add(self, spec: RayNodeSpec) -> None:
        """Start a raylet; the same name gets another address and another id of Ray's."""
        self._specs[spec.name] = spec
        self._num_added += 1
        with warnings.catch_warnings(), _patient():
            warnings.simplefilter("ignore")
            self._nodes[spec.name] = _retried(
                lambda: self._cluster.add_node(
                    wait=False,
                    num_cpus=0,
                    num_gpus=spec.num_gpus,
                    node_ip_address=f"127.0.0.{2 + self._num_added}",
                    object_store_memory=_STORE_BYTES,
                    labels={
                        "drystone-gpu": spec.gpu,
                        "drystone-speed": "0.0003",
                        "drystone-memory": "4GiB",
                    },
                )
            )

    def raylet(self, name: str) -> int:
        """The process of a node's raylet; 0 if it is dead."""
        if name not in self._nodes:
            return 0
        [info] = self._nodes[name].all_processes["raylet"]
        return info.process.pid if info.process.poll() is None else 0

    def ray_id(self, name: str) -> str:
        return self._nodes[name].node_id

    def ip_address(self, name: str) -> str:
        return self._nodes[name].node_ip_address

    def name_of(self, node: str) -> str:
        """Our name of a node, given Drystone's: the type and the start of Ray's id."""
        return next(
            (one for one in self._nodes if self.ray_id(one).startswith(node.rpartition("-")[2])), ""
        )

    def kill(self, name: str) -> None:
        """As in a crash: SIGKILL, and nothing is tidied up."""
        pid = self.raylet(name)
        if pid:
            os.kill(pid, signal.SIGKILL)
            self._nodes[name].all_processes["raylet"][0].process.wait(10)

    def hang(self, name: str, others: list[int]) -> None:
        """The raylet and other processes of the node stop in the middle."""
        self._stopped[name] = [self.raylet(name), *others]
        for pid in filter(None, self._stopped[name]):
            _signal(pid, signal.SIGSTOP)

    def revive(self, name: str) -> None:
        """Let a hung node go on; where its raylet is dead, start another one."""
        for pid in self._stopped.pop(name, []):
            _signal(pid, signal.SIGCONT)
        if self._is_dying(name):
            self._remove(name)
            self.add(self._specs[name])

    def heal(self) -> None:
        """Start every node again whose raylet is dead, whoever ended it."""
        for name in list(self._specs):
            self.revive(name)

    def _is_dying(self, name: str, seconds: float = 5.0) -> bool:
        """Whether its raylet is dead, or soon will be: Ray ends one that it took for lost."""
        import ray

        deadline = time.monotonic() + seconds
        while self.raylet(name):
            alive = {one["NodeID"]: one["Alive"] for one in ray.nodes()}
            if alive.get(self.ray_id(name), True) or time.monotonic() > deadline:
                return False
            time.sleep(0.1)
        return True

    def _remove(self, name: str) -> None:
        node = self._nodes.pop(name)
        self._cluster.worker_nodes.discard(node)
        node.kill_all_processes(check_alive=False, allow_graceful=False)

    def close(self) -> None:
        """End the cluster; only processes that it started."""
        if self._cluster is None:
            return
        import ray

        for pids in self._stopped.values():
            for pid in pids:
                _signal(pid, signal.SIGCONT)
        ray.shutdown()
        for name in list(self._nodes):
            self._remove(name)
        self._cluster.head_node.kill_all_processes(check_alive=False, allow_graceful=False)
        self._cluster = None
        atexit.unregister(self.close)
        shutil.rmtree(self._folder, ignore_errors=True)


_shared: list[RayCluster] = []


def shared_cluster() -> RayCluster:
    """The cluster of this process, started when first asked for."""
    if not _shared:
        _shared.append(RayCluster())
    return _shared[0]


def close_shared() -> None:
    """End it, if there is one."""
    while _shared:
        _shared.pop().close()


def _retried(start):
    """A raylet whose own helpers take too long to come up ends itself; another one may not."""
    for _ in range(2):
        try:
            return start()
        except Exception as error:  # Ray raises no kind of its own
            if "timed out during startup" not in str(error):
                raise
    return start()


@contextmanager
def _patient():
    """Ray gives a raylet 30 s to come up, which a busy machine may not be able to do."""
    from ray._private import services

    asked = services.get_node

    def get_node(*arguments):
        deadline = time.monotonic() + _START_SECONDS
        while True:
            try:
                return asked(*arguments)
            except RuntimeError:
                if time.monotonic() > deadline:
                    raise

    with mock.patch.object(services, "get_node", get_node), mock.patch.dict(os.environ):
        # The suite hides real GPUs; Ray would take it that a node has no more than those.
        os.environ.pop("CUDA_VISIBLE_DEVICES", None)
        yield


def _signal(pid: int, number: int) -> None:
    with suppress(ProcessLookupError):
        os.kill(pid, number)
