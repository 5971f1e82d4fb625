"""A real Slurm of one's own: munged, slurmctld and a slurmd for each node, in one folder.

Everything runs in the foreground with a private key, private sockets and ports on loopback, and is
ended with `close`, whatever happens; two clusters on one machine do not see each other. GPUs are
character devices that answer like /dev/null: enough for Slurm, which only counts them.
"""

import os
import secrets
import shutil
import signal
import socket
import stat
import subprocess
import time
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path

import pytest

SBIN = "/usr/sbin:/sbin"


@dataclass(frozen=True)
class SlurmNode:
    name: str
    gpu: str
    num_gpus: int
    partition: str = "gpu"
    features: str = ""


# Two of A100s, one of V100s, one of T4s.
NODES = (
    SlurmNode("a1", "a100", 2),
    SlurmNode("a2", "a100", 2),
    SlurmNode("v1", "v100", 2),
    SlurmNode("t1", "t4", 2),
)


def missing_slurm() -> str:
    """Why no Slurm can be started here; empty where it can."""
    tools = ("munged", "slurmctld", "slurmd", "sbatch", "srun", "scontrol", "squeue", "scancel")
    path = os.environ.get("PATH", "") + ":" + SBIN
    missing = [tool for tool in tools if shutil.which(tool, path=path) is None]
    if missing:
        return "left out: no Slurm here (as root on Debian: tests/engines/install_slurm.sh)"
    if os.getuid() != 0:
        return "left out: a Slurm of one's own needs root, for its devices (sudo make test)"
    return ""


def skip_without_slurm() -> None:
    """Skip the test where no Slurm can be started; continuous integration must have it."""
    reason = missing_slurm()
    if reason and os.environ.get("CI") == "true" and os.getuid() == 0:
        pytest.fail(reason)
    if reason:
        pytest.skip(reason)


class SlurmCluster:
    """Daemons of one cluster; `environment` leads Slurm's commands to it."""

    def __init__(self, folder: Path, nodes: tuple[SlurmNode, ...] = NODES, *, config: str = ""):
        self.folder, self.nodes = folder, nodes
        self.environment = {"SLURM_CONF": str(folder / "slurm.conf")}
        self._daemons: dict[str, subprocess.Popen] = {}
        names = ["ctld", *(one.name for one in nodes)]
        self._ports = dict(zip(names, _free_ports(len(names)), strict=True))
        for name in ("state", "log"):
            (folder / name).mkdir(parents=True)
        self._write(config)

    # --- daemons --------------------------------------------------------------------------------

    def start(self) -> None:
        key = self.folder / "munge.key"
        key.write_bytes(secrets.token_bytes(1024))
        key.chmod(0o600)
        self.folder.chmod(0o755)
        self._spawn(
            "munged", "--foreground", "--force", f"--key-file={key}",
            f"--socket={self.folder / 'munge.sock'}", f"--pid-file={self.folder / 'munged.pid'}",
            f"--log-file={self.folder / 'log' / 'munged.log'}",
            f"--seed-file={self.folder / 'munged.seed'}",
        )  # fmt: skip
        self.until(lambda: (self.folder / "munge.sock").exists(), "munged has made no socket")
        self._spawn("slurmctld", "-D", "-c")
        for node in self.nodes:
            self.start_node(node.name)
        self.until(lambda: set(self.states().values()) == {"idle"}, "not all nodes became idle")

    def start_node(self, name: str) -> None:
        """(Re)start the daemon of a node."""
        self._spawn("slurmd", "-D", "-N", name, key=name)

    def revive_node(self, name: str) -> None:
        """A killed node comes up again.

        It was not asked to end the jobs that were cancelled while it was dead, and Slurm asks again
        only after up to two minutes. An administrator does not wait for that: a node that is marked
        down has no jobs, and `ReturnToService=2` takes it back when its daemon reports.
        """
        if self.run("squeue", "-h", "-t", "completing", "-w", name):
            self.run("scontrol", "update", f"nodename={name}", "state=down", "reason=crashed")
        self.start_node(name)

    def kill_node(self, name: str) -> float:
        """SIGKILL to the node's slurmd; what it started goes on. When that was, by `monotonic`."""
        daemon = self._daemons[name]
        daemon.send_signal(signal.SIGKILL)
        daemon.wait(timeout=10)
        return time.monotonic()

    def stop_node(self, name: str) -> None:
        """The node hangs: its slurmd and everything under it stops, and does not end."""
        for pid in [self._daemons[name].pid, *self.step_pids(name)]:
            _send(pid, signal.SIGSTOP)

    def continue_node(self, name: str) -> None:
        for pid in [self._daemons[name].pid, *self.step_pids(name)]:
            _send(pid, signal.SIGCONT)

    def close(self) -> None:
        """End everything of this cluster, steps and what they started included."""
        for name in self._daemons:
            _send(self._daemons[name].pid, signal.SIGCONT)
        for pid in self.all_step_pids():
            _send(pid, signal.SIGKILL)
        for daemon in reversed(self._daemons.values()):
            if daemon.poll() is None:
                daemon.terminate()
        for daemon in reversed(self._daemons.values()):
            try:
                daemon.wait(timeout=10)
            except subprocess.TimeoutExpired:
                daemon.kill()
                daemon.wait(timeout=10)
        for pid in self.all_step_pids():
            _send(pid, signal.SIGKILL)

    # --- what it knows --------------------------------------------------------------------------

    def run(self, *command: str, check: bool = True) -> str:
        """One of Slurm's commands."""
        done = subprocess.run(
            command, env={**os.environ, **self.environment}, capture_output=True, text=True,
            timeout=30, check=False,
        )  # fmt: skip
        assert not check or done.returncode == 0, (command, done.stdout, done.stderr)
        return done.stdout

    def states(self) -> dict[str, str]:
        """By node: `idle`, `mix`, `down*` ..."""
        lines = self.run("sinfo", "-N", "-h", "-o", "%N %T", check=False).split("\n")
        return dict(line.split() for line in lines if line.strip())

    def queue(self) -> list[str]:
        """Ids of jobs that wait or run."""
        return self.run("squeue", "-h", "-o", "%i").split()

    def step_pids(self, node: str) -> list[int]:
        """Processes that this cluster's Slurm started on a node, and their children."""
        return [pid for pid, name in self._slurm_processes() if name == node]

    def all_step_pids(self) -> list[int]:
        return [pid for pid, _ in self._slurm_processes()]

    def _slurm_processes(self) -> list[tuple[int, str]]:
        """Told by their environment, which children inherit: (pid, node; "" for Slurm's own)."""
        ours = f"SLURM_CONF={self.environment['SLURM_CONF']}"
        found = []
        for entry in Path("/proc").iterdir():
            if not entry.name.isdigit() or int(entry.name) in self._daemon_pids():
                continue
            try:
                lines = (entry / "environ").read_bytes().decode(errors="replace").split("\0")
                is_step = _command(entry).startswith("slurmstepd")
                # Its title may have overwritten its environment; its log is still open.
                files = [os.readlink(one) for one in (entry / "fd").iterdir()] if is_step else []
            except OSError:
                continue
            names = [one[16:] for one in lines if one.startswith("SLURMD_NODENAME=")]
            has_ours = any(one.startswith(f"{self.folder}/") for one in files)
            if (ours in lines and (names or is_step)) or has_ours:
                found.append((int(entry.name), names[0] if names else ""))
        return found

    def _daemon_pids(self) -> set[int]:
        return {daemon.pid for daemon in self._daemons.values()} | {os.getpid()}

    def until(self, condition, why: str, *, seconds: float = 60.0) -> None:
        deadline = time.monotonic() + seconds
        while not condition():
            if time.monotonic() > deadline:
                logs = "\n".join(
                    f"--- {path.name}\n{path.read_text(errors='replace')[-1500:]}"
                    for path in sorted((self.folder / "log").iterdir())
                )
                raise AssertionError(f"{why}\n{self.states()}\n{logs}")
            time.sleep(0.05)

    # --- inside ---------------------------------------------------------------------------------

    def _spawn(self, program: str, *arguments: str, key: str = "") -> None:
        path = shutil.which(program, path=os.environ.get("PATH", "") + ":" + SBIN)
        assert path is not None
        name = key or program
        with (self.folder / "log" / f"{name}.out").open("ab") as log:
            self._daemons[name] = subprocess.Popen(
                [path, *arguments], stdin=subprocess.DEVNULL, stdout=log, stderr=log,
                cwd=self.folder, env={**os.environ, **self.environment},
            )  # fmt: skip

    def _write(self, config: str) -> None:
        host = socket.gethostname().split(".")[0]
        folder, log = self.folder, self.folder / "log"
        lines = [
            "ClusterName=drystone",
            f"SlurmctldHost={host}(127.0.0.1)",
            f"SlurmctldPort={self._ports['ctld']}",
            "SlurmUser=root",
            "SlurmdUser=root",
            "AuthType=auth/munge",
            f"AuthInfo=socket={folder / 'munge.sock'}",
            "CommunicationParameters=NoCtldInAddrAny,NoInAddrAny",
            f"StateSaveLocation={folder / 'state'}",
            f"SlurmdSpoolDir={folder / 'spool-%n'}",
            f"SlurmctldPidFile={folder / 'slurmctld.pid'}",
            f"SlurmdPidFile={folder / 'slurmd-%n.pid'}",
            f"SlurmctldLogFile={log / 'slurmctld.log'}",
            f"SlurmdLogFile={log / 'slurmd-%n.log'}",
            "ProctrackType=proctrack/linuxproc",
            "TaskPlugin=task/none",
            "SwitchType=switch/none",
            "MpiDefault=none",
            "SlurmdParameters=config_overrides",
            "SelectType=select/cons_tres",
            "SelectTypeParameters=CR_Core",
            "GresTypes=gpu",
            "ReturnToService=2",
            "AccountingStorageType=accounting_storage/none",
            "JobAcctGatherType=jobacct_gather/none",
            "KillWait=30",
            config,
        ]
        gres = ["AutoDetect=off"]
        for node in self.nodes:
            devices = folder / "devices" / node.name
            devices.mkdir(parents=True)
            (folder / f"spool-{node.name}").mkdir()
            for index in range(node.num_gpus):
                os.mknod(devices / f"nvidia{index}", 0o666 | stat.S_IFCHR, os.makedev(1, 3))
            features = f" Feature={node.features}" if node.features else ""
            lines.append(
                f"NodeName={node.name} NodeHostname={host} NodeAddr=127.0.0.1 "
                f"Port={self._ports[node.name]} CPUs=16 RealMemory=16000 "
                f"Gres=gpu:{node.gpu}:{node.num_gpus}{features}"
            )
            gres.append(
                f"NodeName={node.name} Name=gpu Type={node.gpu} "
                f"File={devices}/nvidia[0-{node.num_gpus - 1}]"
            )
        for index, name in enumerate(dict.fromkeys(one.partition for one in self.nodes)):
            members = ",".join(one.name for one in self.nodes if one.partition == name)
            default = "YES" if index == 0 else "NO"
            lines.append(f"PartitionName={name} Nodes={members} Default={default} State=UP")
        (folder / "slurm.conf").write_text("\n".join(line for line in lines if line) + "\n")
        (folder / "gres.conf").write_text("\n".join(gres) + "\n")
        told = self.run("sinfo", "--version")  # "slurm-wlm 22.05.8"
        if tuple(int(part) for part in told.split()[-1].split(".")[:2]) >= (
            23,
            11,
        ):  # older ones do not know the word
            (folder / "cgroup.conf").write_text("CgroupPlugin=disabled\n")


@contextmanager
def slurm_cluster(folder: Path, nodes: tuple[SlurmNode, ...] = NODES, *, config: str = ""):
    """A started cluster, ended in any case; where none can be had the test is skipped."""
    skip_without_slurm()
    cluster = SlurmCluster(folder, nodes, config=config)
    try:
        cluster.start()
        yield cluster
    finally:
        cluster.close()


def _free_ports(count: int) -> list[int]:
    probes = [socket.socket() for _ in range(count)]
    for probe in probes:
        probe.bind(("127.0.0.1", 0))
    ports = [probe.getsockname()[1] for probe in probes]
    for probe in probes:
        probe.close()
    return ports


def _command(entry: Path) -> str:
    try:
        return (entry / "cmdline").read_bytes().decode(errors="replace")
    except OSError:
        return ""


def _send(pid: int, number: int) -> None:
    try:
        os.kill(pid, number)
    except ProcessLookupError:
        return
