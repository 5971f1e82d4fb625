"""The engine with a stand-in for Ray, and real agents on this machine."""

import os
import signal
import time
from contextlib import contextmanager

import pytest

from drystone.errors import DrystoneError
from drystone.run.engines.agent.client import AgentGone
from drystone.run.engines.ray.engine import RayEngine, RaySettings
from drystone.run.engines.ray.nodes import begin_agent
from drystone.run.engines.ray.watch import Lock, NoNodes

SETTINGS = RaySettings(look_seconds=0.05, retry_seconds=0.2, start_seconds=20.0)


class FakeRay:
    """Answers as Ray does; an agent is started where it is asked."""

    def __init__(self, *numbers: int) -> None:
        self.rows = {number: self.row(number) for number in numbers}
        self.groups: dict[str, Lock] = {}
        self.grants = True
        self.free: dict[str, float] = {}
        self.refusal = ""
        self.asked: list[str] = []

    @staticmethod
    def row(number: int) -> dict:
        return {
            "NodeID": f"{number:06x}" + "0" * 50,
            "Alive": True,
            "NodeManagerAddress": "127.0.0.1",
            "Resources": {"GPU": 2.0},
            "Labels": {"drystone-gpu": "T4", "drystone-speed": "0.1"},
        }

    def close(self) -> None:
        pass

    def nodes(self) -> list[dict]:
        return list(self.rows.values())

    def begin(self, ray_id: str, wish):
        self.asked.append(wish.node)
        return wish

    def answer(self, wish):
        if self.refusal:
            return self.refusal
        try:
            return begin_agent(wish)
        except DrystoneError as error:
            return str(error)

    def locks(self) -> dict[str, Lock]:
        return dict(self.groups)

    def free_gpus(self) -> dict[str, float]:
        return dict(self.free)

    def lock(self, name: str, gpus) -> None:
        self.groups[name] = Lock(self.grants, dict(gpus) if self.grants else {})

    def unlock(self, name: str) -> None:
        self.groups.pop(name, None)


@contextmanager
def opened(folder, ray: FakeRay):
    engine = RayEngine(folder, ray, SETTINGS)
    try:
        yield engine
    finally:
        engine.quit()
        engine.close()


def until(engine: RayEngine, condition):
    """Poll until the condition holds for what came; what came last."""
    deadline = time.monotonic() + 20
    while True:
        poll = engine.poll({}, [], 10.0)
        if condition(poll):
            return poll
        assert time.monotonic() < deadline
        time.sleep(0.02)


def names(cluster) -> list[str]:
    return [node.id for node in cluster.nodes]


def test_nodes_come_with_their_agents_and_leave_when_ray_says_so(tmp_path):
    ray = FakeRay(1)
    with opened(tmp_path, ray) as engine:
        assert names(engine.discover()) == ["t4-000001"]
        engine.start(1)
        assert engine.poll({}, [], 10.0).cluster is None  # nothing new
        ray.rows[2] = ray.row(2)
        joined = until(engine, lambda poll: poll.cluster is not None)
        assert names(joined.cluster) == ["t4-000001", "t4-000002"]
        assert engine.rendezvous("t4-000002").address == "127.0.0.1"
        assert engine.ask("t4-000002", "hello")["node"] == "t4-000002"

        ray.rows[1] |= {"Alive": False, "DeathReasonMessage": "unplugged"}
        left = until(engine, lambda poll: poll.cluster is not None)
        assert names(left.cluster) == ["t4-000002"]
        assert left.left == {"t4-000001": "unplugged"}
        with pytest.raises(AgentGone):
            engine.ask("t4-000001", "hello")


def test_the_next_controller_finds_the_agents_without_ray(tmp_path):
    first = FakeRay(1)
    engine = RayEngine(tmp_path, first, SETTINGS)
    engine.discover()
    engine.start(1)
    pid = engine.ask("t4-000001", "hello")["pid"]
    engine.close()
    second = FakeRay(1)
    with opened(tmp_path, second) as engine:
        engine.discover()
        engine.start(2)
        assert engine.ask("t4-000001", "hello")["pid"] == pid
        assert second.asked == []


def test_a_folder_that_is_not_shared_is_refused_with_the_reason(tmp_path):
    ray = FakeRay(1)
    engine = RayEngine(tmp_path, ray, SETTINGS)
    engine._token_text = "another folder's"

    with pytest.raises(NoNodes, match="not the same folder") as refusal:
        engine.discover()
    assert "--folder" in refusal.value.hint


def test_a_node_that_refuses_is_asked_again(tmp_path):
    ray = FakeRay(1)
    with opened(tmp_path, ray) as engine:
        engine.discover()
        engine.start(1)
        ray.refusal = "no space left"
        ray.rows[2] = ray.row(2)
        until(engine, lambda _: ray.asked.count("t4-000002") >= 2)
        ray.refusal = ""
        until(engine, lambda poll: poll.cluster is not None and len(poll.cluster.nodes) == 2)


def test_a_lock_is_held_when_ray_has_it_and_found_again(tmp_path):
    ray = FakeRay(1)
    ray.grants = False
    key, gpus = ("7", 3), {"t4-000001": 2}
    with opened(tmp_path, ray) as engine:
        engine.discover()
        engine.start(1)
        assert not engine.reserve(key, gpus)
        until(engine, lambda _: ray.groups)
        assert not engine.reserve(key, gpus)  # others have the GPUs
        assert engine.held() == {key}
        [name] = ray.groups
        ray.groups[name] = Lock(True, {})
        until(engine, lambda _: engine.reserve(key, gpus))
        engine.close()

        later = RayEngine(tmp_path, ray, SETTINGS)
        later.discover()
        assert later.held() == {key}
        later.release(key)
        assert later.held() == frozenset()
        deadline = time.monotonic() + 10
        while ray.groups:
            assert time.monotonic() < deadline
            time.sleep(0.02)
        later.close()


def test_other_systems_locks_are_not_ours(tmp_path):
    ray = FakeRay(1)
    node = ray.rows[1]["NodeID"]
    ray.groups["drystone-00000000-5.1"] = Lock(True, {node: 1.0})
    ray.free = {node: 0.0}
    with opened(tmp_path, ray) as engine:
        engine.discover()
        engine.start(1)
        assert engine.held() == frozenset()
        until(engine, lambda poll: poll.taken == {"t4-000001": 2})
        assert not engine.reserve(("1", 1), {"t4-000001": 1})
        until(engine, lambda poll: poll.taken == {"t4-000001": 1})  # the other one is ours now
        assert engine.held() == {("1", 1)}


@pytest.mark.slow
def test_an_agent_that_was_killed_is_started_again(tmp_path):
    ray = FakeRay(1)
    with opened(tmp_path, ray) as engine:
        engine.discover()
        engine.start(1)
        pid = engine.ask("t4-000001", "hello")["pid"]
        os.kill(pid, signal.SIGSTOP)  # it hangs
        until(engine, lambda poll: poll.silent)
        until(engine, lambda poll: not poll.silent)
        assert engine.ask("t4-000001", "hello")["pid"] != pid
