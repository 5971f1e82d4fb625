"""A Ray cluster as an engine: an agent of ours on each node, a placement group for each launch.

Ray says which nodes there are, starts our agents, and keeps the GPUs of a launch from others. What
trains is started and watched by the agents, over connections of our own. Nodes join when their
agents answer. They have left as soon as Ray says so, or their agents do: an agent notices within a
tenth of a second that the raylet of its node is gone.
"""

from __future__ import annotations

import logging
import math
import secrets
import time
from collections.abc import Iterable, Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from drystone.describe.files.cluster import ClusterSpec
from drystone.run.engines.agent.client import AgentGone, Remote, find_agent
from drystone.run.engines.agent.network import keep_secret
from drystone.run.engines.agents_on_nodes import (
    LaunchNames,
    NodeAgents,
    TakenGpus,
    read_shared_file,
    silence_reason,
)
from drystone.run.engines.contract import Key, Poll, Rendezvous
from drystone.run.engines.ray.nodes import AgentRequest, RayNode, cluster_of, own_version
from drystone.run.engines.ray.watch import NoNodes, RayConnection, RayView, RayWatch


@dataclass(frozen=True, slots=True, kw_only=True)
class RaySettings:
    """How often Ray is asked, and how long it may take."""

    look_seconds: float = 1.0  # between looks at Ray; agents are asked at every tick
    start_seconds: float = 120.0  # for the first agents to come up
    retry_seconds: float = 5.0  # before an agent that did not come up is tried again
    restart_seconds: float = 1.0  # an agent that says nothing for so long is started anew
    silence_seconds: float = 5.0  # and after so long its node is lost


class RayEngine:
    """Nodes of Ray, and our agents there. `folder` is on a disk that all nodes share."""

    def __init__(
        self,
        folder: Path,
        connection: RayConnection,
        settings: RaySettings | None = None,
        file: ClusterSpec | None = None,
    ) -> None:
        self._folder, self._settings = folder.absolute(), settings or RaySettings()
        self._folder.mkdir(parents=True, exist_ok=True, mode=0o700)
        self._secret_file = self._folder / "secret"
        self._secret = keep_secret(self._secret_file)
        self._names = LaunchNames(self._folder)
        self._token = self._folder / "token"
        self._token_text = secrets.token_hex(8)
        self._token.write_text(self._token_text, encoding="ascii")
        self._connection = connection
        self._file = file  # what Ray cannot know, by GPU type
        self._watch = RayWatch(connection, file, look_seconds=self._settings.look_seconds)
        self._agents = NodeAgents()
        self._nodes: dict[str, RayNode] = {}  # those whose agents are there
        self._tried: dict[str, float] = {}  # when an agent was asked for
        self._refused: dict[str, str] = {}  # nodes that cannot be used, and why
        self._left_ids: set[str] = set()  # Ray's ids of nodes whose agents said goodbye
        self._taken = TakenGpus()
        self._log = logging.getLogger("drystone.ray")

    # --- from start to end ----------------------------------------------------------------------

    @property
    def trouble(self) -> str:
        """Why Ray does not answer."""
        return self._watch.thread.trouble

    def discover(self) -> ClusterSpec:
        """Let all nodes start their agents; the nodes whose agents answer."""
        if self._watch.thread.is_running:
            return self._cluster()
        self._watch.thread.start()
        wanted = self._watch.view.found.nodes
        self._bring_up(self._watch.view)
        deadline = time.monotonic() + self._settings.start_seconds
        while time.monotonic() < deadline and any(
            name not in self._nodes and name not in self._refused for name in wanted
        ):
            self._watch.thread.wait_for_look(0.2)
            self._take_answers()
        for ray_id, why in self._watch.view.found.passed_over.items():
            self._log.warning("Ray's node %s is passed over: %s", ray_id[:6], why)
        if wanted and not self._nodes:
            self.close()
            told = "; ".join(f"{name}: {why}" for name, why in self._refused.items())
            raise NoNodes(
                f"no node of the Ray cluster can be used: {told or 'no agent has answered'}",
                hint="All nodes need this version of drystone and the folder of the service at "
                "the same path: drystone serve --folder ON_A_SHARED_DISK",
            )
        self._agents.take_changes()
        return self._cluster()

    def start(self, controller: int) -> None:
        """Orders carry this epoch from now on."""
        self._agents.set_controller(controller)

    def close(self) -> None:
        """Let go of agents and of Ray; locks stay, and so does what trains."""
        self._agents.close()
        self._watch.thread.close(wait_seconds=5.0)
        self._connection.close()

    def quit(self) -> None:
        """End all agents, and give all locks back."""
        self._agents.quit()
        for key in self.held():
            self.release(key)

    # --- looking --------------------------------------------------------------------------------

    def poll(self, offsets: Mapping[Key, int], renew: Iterable[Key], lease_seconds: float) -> Poll:
        """Ask every agent how its launches stand, and take in what Ray said meanwhile."""
        answers = self._agents.poll(offsets, renew, lease_seconds)
        view = self._watch.view
        for name, reason in answers.leaving.items():
            self._left_ids.add(self._nodes[name].ray_id)
            self._lose(name, reason)
        for name, node in list(self._nodes.items()):
            if node.ray_id in view.dead:
                self._lose(name, view.dead[node.ray_id])
            elif name in answers.silent:
                self._revive(node)
        self._left_ids -= view.dead.keys()
        self._take_answers()
        self._bring_up(view)
        has_changed, left = self._agents.take_changes()
        return Poll(
            tuple(launch for launch in answers.launches if launch.node in self._nodes),
            frozenset(answers.silent & self._nodes.keys()),
            self._cluster() if has_changed else None,
            left,
            self._lost(),
            self._taken_by_others(view),
        )

    def _lost(self) -> dict[str, str]:
        """Nodes that Ray still has, but whose agents have said nothing for long."""
        silences = {name: self._agents.silent_seconds(name) for name in self._nodes}
        return {
            name: silence_reason(seconds)
            for name, seconds in silences.items()
            if seconds > self._settings.silence_seconds
        }

    def _taken_by_others(self, view: RayView) -> dict[str, int]:
        """GPUs that Ray has given to others."""
        if self._taken.is_new(view.asked):
            ours: dict[str, float] = {}
            for name, lock in view.locks.items():
                if name.startswith(self._names.prefix):
                    for ray_id, count in lock.gpus.items():
                        ours[ray_id] = ours.get(ray_id, 0.0) + count
            now = {}
            for name, node in self._nodes.items():
                total = node.spec.num_gpus
                free = view.free_gpus.get(node.ray_id, total)
                now[name] = math.ceil(max(0.0, total - free - ours.get(node.ray_id, 0.0)))
            self._taken.note(view.asked, now)
        return self._taken.agreed()

    def ask(self, node: str, op: str, **values: Any) -> dict[str, Any]:
        """One request to one agent."""
        return self._agents.ask(node, op, **values)

    def read(self, node: str, *, job_id: str, epoch: int, name: str, offset: int) -> dict[str, Any]:
        """From the agent; of a node that is gone, from the disk that all share."""
        which: dict[str, Any] = {"job_id": job_id, "epoch": epoch, "name": name, "offset": offset}
        try:
            return self._agents.read(node, **which)
        except AgentGone:
            return read_shared_file(self._folder, node, **which)

    def rendezvous(self, node: str) -> Rendezvous:
        """The address that Ray knows the node by, and a port that its agent found free."""
        port = int(self._agents.ask(node, "port")["port"])
        return Rendezvous(address=self._nodes[node].address, port=port)

    # --- locks ----------------------------------------------------------------------------------

    def reserve(self, key: Key, gpus: Mapping[str, int]) -> bool:
        """One placement group for the launch, whose bundles name their nodes."""
        name = self._names.name(key)
        lock = self._watch.view.locks.get(name)
        if lock is not None and lock.is_held:
            return True
        if all(node in self._nodes for node in gpus):
            self._watch.lock(name, {self._nodes[node].ray_id: gpus[node] for node in gpus})
        return False

    def held(self) -> frozenset[Key]:
        """The launches of this system that have a placement group."""
        return self._names.keys(self._watch.lock_names())

    def release(self, key: Key) -> None:
        """Remove the placement group."""
        self._watch.unlock(self._names.name(key))

    # --- nodes ----------------------------------------------------------------------------------

    def _cluster(self) -> ClusterSpec:
        return cluster_of(self._nodes.values(), self._file)

    def _bring_up(self, view: RayView) -> None:
        """Have agents started on nodes that have none."""
        now = time.monotonic()
        for name, node in view.found.nodes.items():
            is_known = name in self._nodes or node.ray_id in self._left_ids
            if is_known or now - self._tried.get(name, -1e9) < self._patience(name):
                continue
            self._tried[name] = now
            # The agent of an earlier controller is used without troubling Ray.
            folder = self._folder / name
            remote = find_agent(folder, name, self._secret, timeout_seconds=1.0)
            if remote is not None:
                self._join(node, remote)
            else:
                self._watch.start_agent(name, node.ray_id, self._request(node))

    def _patience(self, name: str) -> float:
        """A node that refused is asked again after a while, one that is still at it is not."""
        settings = self._settings
        return settings.retry_seconds if name in self._refused else settings.start_seconds

    def _request(self, node: RayNode, *, replaces_hung: bool = False) -> AgentRequest:
        return AgentRequest(
            folder=str(self._folder / node.spec.id),
            node=node.spec.id,
            host=node.address,
            secret=str(self._secret_file),
            token=str(self._token),
            token_text=self._token_text,
            version=own_version(),
            replaces_hung=replaces_hung,
        )

    def _take_answers(self) -> None:
        nodes = self._watch.view.found.nodes
        for name, answer in self._watch.answers().items():
            if name not in nodes:
                continue  # it has left meanwhile
            if isinstance(answer, str):
                if self._refused.get(name) != answer:
                    self._log.warning("%s cannot be used: %s", name, answer)
                self._refused[name], self._tried[name] = answer, time.monotonic()
                continue
            self._refused.pop(name, None)
            remote = Remote(host=answer["host"], port=int(answer["port"]), secret=self._secret)
            self._join(nodes[name], remote)

    def _join(self, node: RayNode, remote: Remote) -> None:
        self._nodes[node.spec.id] = node
        self._agents.join(node.spec.id, remote)

    def _lose(self, name: str, reason: str) -> None:
        """A node has left for good."""
        if self._nodes.pop(name, None) is not None:
            self._agents.leave(name, reason)

    def _revive(self, node: RayNode) -> None:
        """Have a silent agent started anew, on a node that Ray has; a hung one is ended first."""
        name, now = node.spec.id, time.monotonic()
        waited = now - self._tried.get(name, -1e9)
        is_late = self._agents.silent_seconds(name) > self._settings.restart_seconds
        if is_late and waited > self._settings.retry_seconds:
            self._tried[name] = now
            self._watch.start_agent(name, node.ray_id, self._request(node, replaces_hung=True))
