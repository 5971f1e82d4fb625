"""What every engine must do, case by case: the same sentences for the simulator and for real ones.

A case takes a running `System` (`under_test.py`) with all nodes there and nothing running. Cases of
`SIMULATED` make sense in virtual time as well; the others need processes, and a `LiveSystem`.
"""

import random
import signal
import time

from under_test import BATCH, LiveSystem, System, kill

from drystone.run.engines.agent.keeper import birth_of
from drystone.run.events import Finished, Interrupted, NodeLost, Progressed, Started, Stopped
from drystone.run.lifecycle import TERMINAL, JobState


def start(system: System) -> None:
    """A job gets the GPUs that were decided on, does all its work, and gives them back."""
    wide = system.wide_node()
    job = system.submit()
    system.place(job, {wide.id: 1})

    assert system.wait_over(job) == ["done"]
    events = system.events(job)
    [started] = [one for one in events if isinstance(one, Started)]
    assert [count for _, count in started.placement] == [1]
    assert isinstance(events[-1], Finished)
    assert started.time_seconds <= events[-1].time_seconds
    if isinstance(system, LiveSystem):
        check_audit(system, job, steps=20)
        system.until(lambda: not system.processes(job), "no process of a job that is done")
        assert system.controller.journal.live.jobs[job].dollars > 0


def gang(system: System) -> None:
    """A job over both types starts on all its GPUs or not at all, each rank on a device of its own.

    Another job sits on one of the GPUs first: nothing of the gang may start before it has left.
    """
    wide, small = system.wide_node(), system.small_nodes()
    wish = {wide.id: 2, small[0].id: 1, small[1].id: 1}
    first, mixed = system.submit(steps=15), system.submit(mixed=True)
    system.place(first, {small[0].id: small[0].num_gpus})
    system.place(mixed, wish)

    assert system.wait_over(first, mixed) == ["done", "done"]
    ended = next(one for one in system.events(first) if isinstance(one, Finished))
    begun = next(one for one in system.events(mixed) if isinstance(one, Started))
    assert small[0].num_gpus > 1 or begun.time_seconds >= ended.time_seconds
    assert sum(count for _, count in begun.placement) == 4
    if not isinstance(system, LiveSystem):
        return
    ranks = system.gang(mixed, 1)
    assert [int(one["RANK"]) for one in ranks] == [0, 1, 2, 3]
    assert {one["WORLD_SIZE"] for one in ranks} == {"4"}
    assert len({(one["MASTER_ADDR"], one["MASTER_PORT"]) for one in ranks}) == 1
    seats = [(one["GROUP_RANK"], one["LOCAL_RANK"]) for one in ranks]
    assert len(set(seats)) == 4
    assert sorted(int(one["LOCAL_WORLD_SIZE"]) for one in ranks) == [1, 1, 2, 2]
    devices = system.controller.journal.live.jobs[mixed].devices
    assert len(set(devices)) == 4
    assert {node for node, _ in devices} == set(wish)
    check_audit(system, mixed, steps=20)


def progress(system: System) -> None:
    """How far a job is, is known while it runs, never goes back, and ends at its work."""
    job = system.submit(steps=40)
    system.place(job, {system.wide_node().id: 1})
    system.wait_step(job, 5)
    assert system.state(job) is JobState.RUNNING
    early = system.step(job)
    system.wait_step(job, early + 5)

    assert system.wait_over(job) == ["done"]
    told = [one for one in system.events(job) if isinstance(one, Progressed)]
    done = [one.done_samples for one in told]
    assert done == sorted(done)
    assert all(one <= 40 * BATCH for one in done)
    if isinstance(system, LiveSystem):
        assert len(done) >= 3
        speeds = [one.samples_per_second for one in told if one.samples_per_second > 0]
        assert speeds[-1] <= 1.05 * BATCH / 0.03  # a step cannot be shorter than its sleep


def logs(system: LiveSystem) -> None:
    """What every rank writes can be read while it runs and later, from where one stopped."""
    job = system.submit(steps=30)
    system.place(job, {system.wide_node().id: 2})
    system.wait_step(job, 2)
    read = system.controller.read_log
    first, offset, epoch = read(job, rank=1)
    assert first.splitlines()[-1] == "rank 1 of 2 in launch 1"
    assert epoch == 1
    assert read(job, rank=1, offset=offset)[0] == ""

    assert system.wait_over(job) == ["done"]
    assert "rank 0 of 2 in launch 1" in read(job)[0]
    assert "rank 0 of 2 on standard output" in read(job, stream="out")[0]


def resize(system: System) -> None:
    """A running job gets more GPUs, then other ones: it goes on where it was, and repeats nothing.

    It saves when it is asked to leave; so every step is done once.
    """
    wide, small = system.wide_node(), system.small_nodes()
    job = system.submit(steps=45)
    system.place(job, {wide.id: 1})
    system.wait_step(job, 6)
    system.place(job, {wide.id: 2})
    system.until(lambda: system.num_starts(job) == 2, "two GPUs")
    system.wait_step(job, system.step(job) + 8)
    system.place(job, {small[0].id: 1})

    assert system.wait_over(job) == ["done"]
    starts = [one for one in system.events(job) if isinstance(one, Started)]
    assert [sum(count for _, count in one.placement) for one in starts] == [1, 2, 1]
    assert sum(isinstance(one, Stopped) for one in system.events(job)) == 2
    assert not [one for one in system.events(job) if isinstance(one, Interrupted)]
    if isinstance(system, LiveSystem):
        assert [len(system.gang(job, epoch)) for epoch in (1, 2, 3)] == [1, 2, 1]
        steps = [line for line in system.audit(job) if " step " in line]
        assert len(steps) == 45
        check_audit(system, job, steps=45)


def exchange(system: System) -> None:
    """Two jobs change places in one round: each waits for the other to leave, and both go on."""
    here, there = ({node.id: node.num_gpus} for node in system.small_nodes()[:2])
    one, two = system.submit(steps=80), system.submit(steps=80)
    system.place(one, here)
    system.place(two, there)
    system.wait_step(one, 6)
    system.wait_step(two, 6)
    system.steering.wishes.update({one: [there], two: [here]})
    system.wake()

    assert system.wait_over(one, two) == ["done", "done"]
    places = {}
    for job in (one, two):
        places[job] = [e.placement for e in system.events(job) if isinstance(e, Started)]
        assert not [e for e in system.events(job) if isinstance(e, Interrupted)]
        if isinstance(system, LiveSystem):
            check_audit(system, job, steps=80)
    assert places[one] == places[two][::-1]
    assert len(set(places[one])) == 2


def preempt(system: System) -> None:
    """A job that loses its GPUs saves, leaves, waits, and later goes on from there."""
    job = system.submit(steps=40)
    system.place(job, {system.wide_node().id: 2})
    system.wait_step(job, 6)
    system.place(job)
    system.until(lambda: system.state(job) is JobState.QUEUED, "a job that waits")
    if isinstance(system, LiveSystem):
        system.until(lambda: not system.processes(job), "no process of a job that waits")
        saved = last_saved(system, job)
        assert saved >= 6
        record = system.controller.find(job)
        system.until(lambda: record.done_samples == saved * BATCH, "the checkpoint in the log")
    system.place(job, {system.small_nodes()[0].id: 1})

    assert system.wait_over(job) == ["done"]
    assert system.num_starts(job) == 2
    assert not [one for one in system.events(job) if isinstance(one, Interrupted)]
    if isinstance(system, LiveSystem):
        assert f"2 started {saved}" in system.audit(job)
        check_audit(system, job, steps=40)


def worker_crash(system: LiveSystem) -> None:
    """One rank of a gang dies: all of it is ended, and starts again from the last checkpoint."""
    job, other = system.submit(steps=40), system.submit(steps=60)
    system.place(job, {system.wide_node().id: 2})
    system.place(other, {system.small_nodes()[0].id: 1})
    system.wait_step(job, 7)
    kill(next(one for one in system.processes(job) if one.rank == 1), signal.SIGKILL)

    assert system.wait_over(job, other) == ["done", "done"]
    [fault] = [one for one in system.events(job) if isinstance(one, Interrupted)]
    assert fault.kind == "crash"
    assert "rank 1: died of SIGKILL" in fault.reason
    assert system.num_starts(job) == 2
    assert system.num_starts(other) == 1
    check_audit(system, job, steps=40)
    check_audit(system, other, steps=60)


def node_loss(system: System) -> None:
    """A node dies: its job goes on elsewhere or later, others do not notice, nothing stays behind.

    When the node is back it is used again.
    """
    wide, small = system.wide_node(), system.small_nodes()
    job, other = system.submit(steps=50), system.submit(steps=60)
    system.place(job, {small[0].id: 1}, {small[1].id: 1})
    system.place(other, {wide.id: 1})
    system.wait_step(job, 7)
    system.engine.kill_node(small[0].id)
    system.until(lambda: system.num_starts(job) == 2, "a second start")

    assert system.wait_over(job, other) == ["done", "done"]
    faults = [one for one in system.events(job) if isinstance(one, Interrupted)]
    assert len(faults) == 1
    assert not [one for one in system.events(other) if isinstance(one, Interrupted)]
    assert system.num_starts(other) == 1
    if isinstance(system, LiveSystem):
        assert faults[0].kind == "node-lost"
        check_audit(system, job, steps=50)
        system.until(lambda: not system.processes(job), "no process of the lost node")
    else:
        assert [one for one in system.events() if isinstance(one, NodeLost)]
    system.engine.revive_node(small[0].id)
    system.until(lambda: len(system.small_nodes()) == len(small), "the node back")
    again = system.submit(steps=3)
    # Whatever it is called now: the one that was not there before, or the same.
    after = [one.id for one in system.small_nodes()]
    system.place(again, {(set(after) - {small[1].id}).pop(): 1})
    assert system.wait_over(again) == ["done"]


def hung_node(system: LiveSystem) -> None:
    """A node stops in the middle: its job goes on elsewhere. When it wakes, it writes nothing."""
    small = system.small_nodes()
    job = system.submit(steps=50)
    system.place(job, {small[0].id: 1}, {small[1].id: 1})
    system.wait_step(job, 7)
    system.engine.hang_node(small[0].id)
    system.until(lambda: system.num_starts(job) == 2, "a second start")
    system.until(lambda: any("2 started" in one for one in system.audit(job)), "a second launch")
    system.engine.revive_node(small[0].id)

    assert system.wait_over(job) == ["done"]
    faults = [one for one in system.events(job) if isinstance(one, Interrupted)]
    assert {one.kind for one in faults} <= {"node-lost", "hang"}
    check_audit(system, job, steps=50)
    system.until(lambda: not system.processes(job), "no process of the node that hung")
    system.until(lambda: len(system.small_nodes()) == len(small), "the node back")


def controller_restart(system: LiveSystem) -> None:
    """The next controller takes over what runs: nothing starts twice, nothing is lost."""
    job, gone = system.submit(steps=80), system.submit(steps=30)
    system.place(job, {system.wide_node().id: 2})
    system.place(gone, {system.small_nodes()[0].id: 1})
    system.wait_step(job, 6)
    system.wait_step(gone, 1)
    before = system.processes(job)
    system.leave(ends_agents=False)
    # One of the two ends while nobody looks.
    deadline = time.monotonic() + system.engine.patience_seconds
    while system.checkpoints(gone).joinpath("over-1").exists() is False:
        assert time.monotonic() < deadline, "the job does not go on without a controller"
        time.sleep(0.05)
    system._run()
    assert [one.pid for one in system.processes(job)] == [one.pid for one in before]

    assert system.wait_over(job, gone) == ["done", "done"]
    assert [system.num_starts(one) for one in (job, gone)] == [1, 1]
    check_audit(system, job, steps=80)
    check_audit(system, gone, steps=30)


def orphan(system: LiveSystem) -> None:
    """A process that left group and session of its launch ends with it, and writes no more."""
    job = system.submit(steps=25, fault="orphan")
    system.place(job, {system.wide_node().id: 1})

    assert system.wait_over(job) == ["done"]
    assert system.num_starts(job) == 2
    told = (system.checkpoints(job) / "orphan").read_text()
    assert told.endswith("wrote at epoch 1"), told
    assert not birth_of(int(told.split()[0])), "the orphan still runs"
    lines = system.audit(job)
    begun = next(row for row, line in enumerate(lines) if line.startswith("2 started"))
    assert not [line for line in lines[begun:] if line == "1 orphan 0"]
    check_audit(system, job, steps=25)


def cancel(system: LiveSystem) -> None:
    """A job that is taken back ends, whether it waits or runs, and its GPUs are free again."""
    wide = system.wide_node()
    running, waiting = system.submit(steps=2000), system.submit()
    system.place(running, {wide.id: 2})
    system.wait_step(running, 3)
    system.controller.cancel(waiting)
    system.controller.cancel(running)

    assert system.wait_over(running, waiting) == ["cancelled", "cancelled"]
    system.until(lambda: not system.processes(running), "no process of a cancelled job")
    after = system.submit(steps=3)
    system.place(after, {wide.id: 2})
    assert system.wait_over(after) == ["done"]
    assert system.num_starts(waiting) == 0


def random_faults(system: LiveSystem, seed: int, num_jobs: int = 5, num_faults: int = 5) -> None:
    """Whatever is done to them, jobs that can be done are done: once, in order, and nothing stays.

    The policy is `prices`, as in real use.
    """
    dice = random.Random(seed)
    system.steering.is_free = True
    jobs = [
        system.submit(steps=dice.choice([20, 40, 60]), mixed=dice.random() < 0.3)
        for _ in range(num_jobs)
    ]
    for _ in range(num_faults):
        pause = time.monotonic() + dice.uniform(0.2, 1.2)
        while time.monotonic() < pause:
            time.sleep(0.05)
        _do_harm(system, dice, jobs)
    for job in jobs:
        if system.state(job) is JobState.PAUSED:
            system.controller.resume(job)
    assert system.wait_over(*jobs) == ["done"] * num_jobs
    for job in jobs:
        steps = int(system.controller.find(job).spec.total_samples) // BATCH
        check_audit(system, job, steps=steps)
    system.until(lambda: not system.processes(), "no process once all is done")


def _do_harm(system: LiveSystem, dice: random.Random, jobs: list[str]) -> None:
    what = dice.choice(["worker", "kill", "hang", "restart", "pause"])
    node = dice.choice([one.id for one in system.nodes])
    match what:
        case "worker":
            alive = system.processes()
            if alive:
                kill(dice.choice(alive), signal.SIGKILL)
        case "kill":
            system.engine.kill_node(node)
            system.engine.revive_node(node)
        case "hang":
            system.engine.hang_node(node)
            wake = time.monotonic() + dice.uniform(0.1, 1.0)
            while time.monotonic() < wake:
                time.sleep(0.05)
            system.engine.revive_node(node)
        case "restart":
            system.restart_controller()
        case "pause":
            job = dice.choice(jobs)
            if system.state(job) is JobState.PAUSED:
                system.controller.resume(job)
            elif system.state(job) not in TERMINAL:
                try_to(lambda: system.controller.pause(job))


def try_to(action) -> None:
    """What a job in motion may not allow any more."""
    from drystone.errors import InvalidSpec

    try:
        action()
    except InvalidSpec:
        return


def last_saved(system: LiveSystem, job_id: str) -> int:
    """The newest checkpoint, as the worker wrote it down."""
    return int([line for line in system.audit(job_id) if " saved " in line][-1].split()[2])


def check_audit(system: LiveSystem, job_id: str, *, steps: int) -> None:
    """One launch at a time, each from the last checkpoint, every step done, no other repeated."""
    lines = [line.split() for line in system.audit(job_id) if "orphan" not in line]
    step, saved, epochs = 0, 0, []
    for epoch, what, number in lines:
        assert what != "twice", system.audit(job_id)
        if what == "started":
            epochs.append(int(epoch))
            # A rank killed right after its checkpoint got its name could not write that down.
            assert saved <= int(number) <= max(saved, step), system.audit(job_id)
            step = saved = int(number)
            continue
        assert int(epoch) == epochs[-1], system.audit(job_id)
        if what == "step":
            assert int(number) == step + 1, system.audit(job_id)
            step = int(number)
        else:
            saved = int(number)
    assert epochs == sorted(set(epochs)), system.audit(job_id)
    assert step == steps, system.audit(job_id)


SIMULATED = (start, gang, progress, resize, exchange, preempt, node_loss)
LIVE = (logs, worker_crash, hung_node, controller_restart, orphan, cancel)
CASES = {one.__name__: one for one in (*SIMULATED, *LIVE)}
