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
from contextlib import suppress
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

from drystone.describe.files.cluster import ClusterSpec
from drystone.run.engines.agent.client import (
    AgentClient,
    AgentGone,
    AgentPool,
    AgentRefused,
    Remote,
)
from drystone.run.engines.agent.launches import read_json, read_lines
from drystone.run.engines.agent.network import keep_secret
from drystone.run.engines.contract import Key, Poll, Rendezvous
from drystone.run.engines.ray.nodes import AgentWish, RayNode, cluster_of, own_version
from drystone.run.engines.ray.watch import Look, NoNodes, RayConnection, Watch


@dataclass(frozen=True, slots=True, kw_only=True)
class RaySettings:
    """How often Ray is asked, and how long it may take."""

    look_seconds: float = 1.0  # between looks at Ray; agents are asked at every tick
    start_seconds: float = 120.0  # for the first agents to come up
    retry_seconds: float = 5.0  # before an agent that did not come up is tried again
    restart_seconds: float = 1.0  # an agent that says nothing for so long is started anew
    silence_seconds: float = 5.0  # and after so long its node is lost


@dataclass(slots=True)
class _Node:
    """A node whose agent is there."""

    node: RayNode
    remote: Remote
    silent_since: float | None = None


@dataclass(slots=True)
class _Change:
    """What the next poll tells."""

    is_new: bool = False
    left: dict[str, str] = field(default_factory=dict)


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
        # Two systems on one Ray cluster must not take each other's locks for theirs.
        self._prefix = f"drystone-{keep_secret(self._folder / 'tag')[:8]}-"
        self._token = self._folder / "token"
        self._token_text = secrets.token_hex(8)
        self._token.write_text(self._token_text, encoding="ascii")
        self._connection = connection
        self._file = file  # what Ray cannot know, by GPU type
        self._watch = Watch(self._connection, file, look_seconds=self._settings.look_seconds)
        self._pool = AgentPool()
        self._nodes: dict[str, _Node] = {}
        self._tried: dict[str, float] = {}  # when an agent was asked for
        self._refused: dict[str, str] = {}  # nodes that cannot be used, and why
        self._left_ids: set[str] = set()  # Ray's ids of nodes whose agents said goodbye
        self._change = _Change()
        self._taken: tuple[int, dict[str, int], dict[str, int]] = (0, {}, {})
        self._log = logging.getLogger("drystone.ray")

    # --- from start to end ----------------------------------------------------------------------

    def discover(self) -> ClusterSpec:
        """Let all nodes start their agents; the nodes whose agents answer."""
        if self._watch.is_running:
            return self._cluster()
        self._watch.start()
        wanted = self._watch.look.found.nodes
        self._bring_up(self._watch.look)
        deadline = time.monotonic() + self._settings.start_seconds
        while time.monotonic() < deadline and any(
            name not in self._nodes and name not in self._refused for name in wanted
        ):
            self._watch.wait_look(0.2)
            self._take_answers()
        self._tell_refusals()
        if wanted and not self._nodes:
            self.close()
            told = "; ".join(f"{name}: {why}" for name, why in self._refused.items())
            raise NoNodes(
                f"no node of the Ray cluster can be used: {told or 'no agent has answered'}",
                hint="All nodes need this version of drystone and the folder of the service at "
                "the same path: drystone serve --folder ON_A_SHARED_DISK",
            )
        self._change = _Change()
        return self._cluster()

    def start(self, controller: int) -> None:
        """Orders carry this epoch from now on."""
        self._pool.controller = controller
        for name, one in self._nodes.items():
            self._pool.put(name, one.remote)

    def close(self) -> None:
        """Let go of agents and of Ray; locks stay, and so does what trains."""
        self._pool.close()
        self._watch.close()
        self._connection.close()

    def quit(self) -> None:
        """End all agents, and give all locks back."""
        self._pool.quit()
        for key in self.held():
            self.release(key)

    # --- looking --------------------------------------------------------------------------------

    def poll(self, offsets: Mapping[Key, int], renew: Iterable[Key], lease_seconds: float) -> Poll:
        """Ask every agent how its launches stand, and take in what Ray said meanwhile."""
        launches, silent, leaving = self._pool.poll(offsets, renew, lease_seconds)
        look = self._watch.look
        for name, reason in leaving.items():
            self._left_ids.add(self._nodes[name].node.ray_id)
            self._lose(name, reason)
        for name, one in list(self._nodes.items()):
            if one.node.ray_id in look.dead:
                self._lose(name, look.dead[one.node.ray_id])
            elif name not in silent:
                one.silent_since = None
            else:
                self._revive(name, one)
        self._left_ids -= look.dead.keys()
        self._take_answers()
        self._bring_up(look)
        change, self._change = self._change, _Change()
        return Poll(
            tuple(one for one in launches if one.node in self._nodes),
            frozenset(silent & self._nodes.keys()),
            self._cluster() if change.is_new else None,
            change.left,
            self._lost(),
            self._taken_by_others(look),
        )

    def _lost(self) -> dict[str, str]:
        """Nodes that Ray still has, but whose agents have said nothing for long."""
        lost, now = {}, time.monotonic()
        for name, one in self._nodes.items():
            silence = now - one.silent_since if one.silent_since is not None else 0.0
            if silence > self._settings.silence_seconds:
                lost[name] = f"the agent of {name} has not answered for {silence:.0f} s"
        return lost

    def _taken_by_others(self, look: Look) -> dict[str, int]:
        """GPUs that Ray has given to others; seen twice, since its numbers come in one by one."""
        number, before, taken = self._taken
        if number != look.number:
            ours: dict[str, float] = {}
            for name, lock in look.locks.items():
                if name.startswith(self._prefix):
                    for ray_id, count in lock.gpus.items():
                        ours[ray_id] = ours.get(ray_id, 0.0) + count
            now = {}
            for name, one in self._nodes.items():
                ray_id, total = one.node.ray_id, one.node.spec.num_gpus
                others = total - look.free_gpus.get(ray_id, total) - ours.get(ray_id, 0.0)
                now[name] = math.ceil(max(0.0, others))
            taken = {name: min(now[name], before.get(name, 0)) for name in now}
            taken = {name: count for name, count in taken.items() if count}
            self._taken = (look.number, now, taken)
        return taken

    def ask(self, node: str, op: str, **values: Any) -> dict[str, Any]:
        """One request to one agent."""
        return self._pool.ask(node, op, **values)

    def read(self, node: str, *, job_id: str, epoch: int, name: str, offset: int) -> dict[str, Any]:
        """From the agent; of a node that is gone, from the disk that all share."""
        one = self._nodes.get(node)
        if one is not None:
            client = AgentClient(one.remote)
            try:
                return client.ask("read", job_id=job_id, epoch=epoch, name=name, offset=offset)
            except AgentGone:
                pass
            finally:
                client.close()
        folder = self._folder / Path(node).name / "launches" / f"{Path(job_id).name}.{int(epoch)}"
        text, end = read_lines(folder / Path(name).name, offset)
        return {"text": text, "offset": end}

    def rendezvous(self, node: str) -> Rendezvous:
        """The address that Ray knows the node by, and a port that its agent found free."""
        port = int(self._pool.ask(node, "port")["port"])
        return Rendezvous(address=self._nodes[node].node.address, port=port)

    # --- locks ----------------------------------------------------------------------------------

    def reserve(self, key: Key, gpus: Mapping[str, int]) -> bool:
        """One placement group for the launch, whose bundles name their nodes."""
        name = self._lock_name(key)
        lock = self._watch.look.locks.get(name)
        if lock is not None and lock.is_held:
            return True
        if all(node in self._nodes for node in gpus):
            ids = {self._nodes[node].node.ray_id: count for node, count in gpus.items()}
            self._watch.lock(name, ids)
        return False

    def held(self) -> frozenset[Key]:
        """The launches of this system that have a placement group."""
        found = set()
        for name in self._watch.lock_names():
            if name.startswith(self._prefix):
                job_id, _, epoch = name.removeprefix(self._prefix).rpartition(".")
                found.add((job_id, int(epoch)))
        return frozenset(found)

    def release(self, key: Key) -> None:
        """Remove the placement group."""
        self._watch.unlock(self._lock_name(key))

    def _lock_name(self, key: Key) -> str:
        return f"{self._prefix}{key[0]}.{key[1]}"

    # --- nodes ----------------------------------------------------------------------------------

    def _cluster(self) -> ClusterSpec:
        return cluster_of([one.node for one in self._nodes.values()], self._file)

    def _bring_up(self, look: Look) -> None:
        """Have agents started on nodes that have none."""
        now = time.monotonic()
        for name, node in look.found.nodes.items():
            is_known = name in self._nodes or node.ray_id in self._left_ids
            if is_known or now - self._tried.get(name, -1e9) < self._patience(name):
                continue
            self._tried[name] = now
            if not self._find_agent(node):
                self._watch.begin(name, node.ray_id, self._wish(node, replaces_hung=False))

    def _patience(self, name: str) -> float:
        """A node that refused is asked again after a while, one that is still at it is not."""
        settings = self._settings
        return settings.retry_seconds if name in self._refused else settings.start_seconds

    def _find_agent(self, node: RayNode) -> bool:
        """The agent of an earlier controller, without troubling Ray."""
        address = read_json(self._folder / node.spec.id / "address.json")
        if address is None:
            return False
        remote = Remote(host=address["host"], port=int(address["port"]), secret=self._secret)
        client = AgentClient(remote, timeout_seconds=1.0)
        try:
            told = client.ask("hello")
        except (AgentGone, AgentRefused):
            return False
        finally:
            client.close()
        if told["node"] != node.spec.id or told["leaving"]:
            return False
        self._join(node, remote)
        return True

    def _wish(self, node: RayNode, *, replaces_hung: bool) -> AgentWish:
        return AgentWish(
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
        nodes = self._watch.look.found.nodes
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
        name = node.spec.id
        self._change.is_new |= name not in self._nodes
        self._nodes[name] = _Node(node, remote)
        self._pool.put(name, remote)

    def _lose(self, name: str, reason: str) -> None:
        """A node has left for good."""
        if self._nodes.pop(name, None) is not None:
            with suppress(AgentGone, AgentRefused):
                self._pool.ask(name, "quit")  # where only Ray lost it, nothing may go on there
            self._pool.drop(name)
            self._change.is_new = True
            self._change.left[name] = reason

    def _revive(self, name: str, one: _Node) -> None:
        """An agent that says nothing, on a node that Ray has: started anew, a hung one ended."""
        now = time.monotonic()
        one.silent_since = since = one.silent_since or now
        waited = now - self._tried.get(name, -1e9)
        if now - since > self._settings.restart_seconds and waited > self._settings.retry_seconds:
            self._tried[name] = now
            self._watch.begin(name, one.node.ray_id, self._wish(one.node, replaces_hung=True))

    def _tell_refusals(self) -> None:
        for ray_id, why in self._watch.look.found.passed_over.items():
            self._log.warning("Ray's node %s is passed over: %s", ray_id[:6], why)
