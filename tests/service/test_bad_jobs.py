"""One job that writes what it should not, or that we cannot cope with: the others do not notice."""

import json
import math

import pytest
from services import serving, until
from systems import TRAINER, running

from drystone.describe.files.job import make_job
from drystone.run.control import runs
from drystone.run.control.notes import Learned
from drystone.run.events import Started
from drystone.run.store_tables import EVENTS

pytestmark = pytest.mark.slow

OVER = ("done", "failed", "refused", "cancelled")
STARTED = '{"event": "started", "step": 0}\n'


def steps_of(seconds: str) -> str:
    return STARTED + "".join(
        f'{{"event": "step", "step": {step}, "loss": 1, "step_seconds": {seconds}}}\n'
        for step in range(1, 9)
    )


HOSTILE = {
    "cut-short-and-deep": '{"a":' * 60_000 + "\n",
    "whole-and-deep": '{"event": "step", "step": 1, "x": ' + "[" * 90_000 + "]" * 90_000 + "}\n",
    "endless-step": STARTED + '{"event": "step", "step": 1' + "0" * 400 + "}\n",
    "endless-loss": STARTED + '{"event": "step", "step": 1, "loss": 1' + "0" * 400 + "}\n",
    "no-time-at-all": steps_of("5e-324"),
    "infinite-time": steps_of("Infinity"),
    "very-long-time": steps_of("1e308"),
    "no-number": steps_of("NaN"),
    "endless-memory": STARTED
    + '{"event": "step", "step": 1, "peak_memory_bytes": [1' + "0" * 400 + "]}\n",
}  # fmt: skip


@pytest.fixture(params=["sqlite", "postgresql"])
def database(request):
    return "" if request.param == "sqlite" else request.getfixturevalue("postgres")()


def hostile_job(folder, name: str, reports: str = "", *, writes: bytes = b"", code: int = 0):
    """A script that reports and prints what it is given."""
    script = folder / f"{name}.py"
    script.write_text(
        "import os, sys, time\n"
        f"open(os.environ['DRYSTONE_PROGRESS'], 'a').write({reports!r})\n"
        f"os.write(2, {writes!r})\n"
        f"time.sleep(1.5)\nsys.exit({code})\n"
    )
    return make_table(f"python {script}", name=name)


def make_table(command: str, **more):
    return {"command": command, "train": {"steps": 20, "batch": 4}, "gpus": {"max": 1}} | more


def test_whatever_a_job_writes_the_others_go_on(database, tmp_path):
    folder = tmp_path / "s"
    with serving(folder, database=database, is_deciding=True) as service:

        def submit(table) -> str:
            body = {"job": table, "folder": str(tmp_path)}
            answer = service.ask("POST", "/v1/jobs", body)
            assert answer.status == 201, answer.body
            return answer.json()["id"]

        def jobs() -> dict:
            answer = service.ask("GET", "/v1/jobs")
            assert answer.status == 200, answer.body
            return {one["id"]: one for one in answer.json()["jobs"]}

        noisy = submit(
            hostile_job(tmp_path, "nul", writes=b"a\0b \x1b[31mred\x1b[0m \x9b\xff\n", code=3)
        )
        script = tmp_path / "pipe.py"
        script.write_text(
            "import os, time\nos.mkfifo(os.environ['DRYSTONE_PROGRESS'])\ntime.sleep(2)"
        )
        pipe = submit(make_table(f"python {script}", name="pipe"))
        hostile = [submit(hostile_job(tmp_path, name, text)) for name, text in HOSTILE.items()]
        decent = submit(
            make_table(f"python {TRAINER}", environment={"STEP_SECONDS": "0.03"}, name="decent")
        )
        every = [noisy, pipe, *hostile, decent]
        until(lambda: all(jobs()[one]["state"] in OVER for one in every), seconds=120)

        found = jobs()
        assert found[decent]["state"] == "done"
        assert found[noisy]["state"] == "failed"
        assert found[pipe]["state"] == "done"
        # Those that ended well before their last step were asked once more, no oftener.
        assert all(job["num_faults"] <= 1 for job in found.values())
        assert found[noisy]["num_faults"] == found[pipe]["num_faults"] == 0
        assert [found[one]["state"] for one in hostile] == ["done"] * len(hostile)
        assert service.controller.last_error == ""
        assert service.ask("GET", "/v1/health").json()["num_jobs_put_aside"] == 0
        reason = service.ask("GET", f"/v1/jobs/{noisy}").json()["reason"]
        assert reason.endswith("a\ufffdb red \ufffd\ufffd")
        text = service.ask("GET", f"/v1/jobs/{noisy}/logs").json()["text"]
        assert text == "a\ufffdb red \ufffd\ufffd\n"
        for job in every:
            assert service.ask("GET", f"/v1/jobs/{job}").status == 200
        assert service.ask("GET", "/v1/events").status == 200
        bad = {
            name: service.ask("GET", f"/v1/jobs/{job}").json()["num_bad_reports"]
            for name, job in zip(HOSTILE, hostile, strict=True)
        }
        assert [name for name, number in bad.items() if number] == list(HOSTILE)[:3]
        for _, line in service.controller.store.read_lines():
            json.loads(line, parse_constant=pytest.fail)
    with serving(folder, database=database) as service:
        states = {one["id"]: one["state"] for one in service.ask("GET", "/v1/jobs").json()["jobs"]}
        assert states == {one: found[one]["state"] for one in every}


def test_a_request_with_control_characters_is_refused(database, tmp_path):
    with serving(tmp_path / "s", database=database) as service:
        for key in ("owner", "client_key", "folder"):
            for text in ("/a\0b", "/a\x1b[31m", "/\ud800"):
                body = {"job": make_table("true"), "folder": "/", key: text}
                assert service.ask("POST", "/v1/jobs", body).status == 422, (key, text)
        assert service.ask("GET", "/v1/jobs").json()["jobs"] == []


def test_a_log_that_holds_infinities_can_still_be_read(database, tmp_path):
    with serving(tmp_path / "s", database=database) as service:
        job, journal = service.submit(), service.journal
        at = journal.now()
        journal.commit(
            [
                Started(time_seconds=at, job_id=job, option=0, placement=((0, 1),),
                        samples_per_second=1.0, productive_seconds=at)
            ]
        )  # fmt: skip
        poison = [
            {"event": "Progressed", "done_samples": 4.0, "samples_per_second": math.inf},
            {"event": "Learned", "work": "w", "gpus": [], "estimated_samples_per_second": 1.0,
             "measured_samples_per_second": math.inf, "memory_share": 0.0},
            {"event": "Decided", "decision": "Start", "reason": "r",
             "numbers": {"price_A100": math.nan, "price_T4": 0.5}},
        ]  # fmt: skip
        with service.controller.store._engine.begin() as connection:
            for number, line in enumerate(poison, start=journal.sequence + 1):
                body = json.dumps(line | {"time_seconds": at, "job_id": job})
                connection.execute(
                    EVENTS.insert().values(
                        sequence=number, time_seconds=at, kind=line["event"], job_id=job, body=body
                    )
                )
    with serving(tmp_path / "s", database=database) as service:
        [shown] = service.ask("GET", "/v1/jobs").json()["jobs"]
        assert (shown["state"], shown["samples_per_second"]) == ("running", None)
        assert service.journal.live.jobs[job].last_decision.numbers == {"price_T4": 0.5}
        assert service.journal.live.lessons["w"].speeds == {}
        for path in ("/v1/events", f"/v1/jobs/{job}", "/v1/cluster", "/metrics"):
            assert service.ask("GET", path).status == 200


def test_a_job_that_cannot_be_looked_after_is_put_aside_and_tried_again(tmp_path, monkeypatch):
    is_broken = True
    supervise = runs.RunSupervisor.supervise

    def failing(self, record, seen):
        if record.spec.id == "1" and is_broken:
            raise ZeroDivisionError("a mistake of ours\0")
        return supervise(self, record, seen)

    monkeypatch.setattr(runs.RunSupervisor, "supervise", failing)
    with serving(tmp_path / "s", is_deciding=True) as service:
        one, two = (
            service.controller.submit(trainer_job(tmp_path, name))[0] for name in ("one", "two")
        )

        def shown(job: str) -> dict:
            return service.ask("GET", f"/v1/jobs/{job}").json()

        until(lambda: shown(two)["state"] == "done")
        troubles = service.controller.reconciler.troubles
        until(lambda: troubles.by_job[one].num_times >= 2)
        assert troubles.num_in_all < 10  # it is not tried all the time
        assert shown(one)["state"] == "running"
        assert "put aside: ZeroDivisionError: a mistake of ours\ufffd" in shown(one)["reason"]
        assert service.ask("GET", "/v1/health").json()["num_jobs_put_aside"] == 1
        assert service.controller.last_error == ""
        metrics = service.ask("GET", "/metrics").body.decode()
        assert "\ndrystone_jobs_put_aside 1\n" in metrics
        is_broken = False
        until(lambda: shown(one)["state"] == "done")
        until(lambda: not troubles.by_job)


def trainer_job(folder, name: str):
    table = make_table(f"python {TRAINER}", name=name, environment={"STEP_SECONDS": "0.03"})
    return make_job(table, folder=folder)


def test_what_cannot_be_written_of_one_job_does_not_take_the_others_reports_with_it(
    tmp_path, monkeypatch
):
    speed_lesson = runs.speed_lesson

    def poisoned(journal, record, speed):
        job_id = record.spec.id
        if job_id != "1":
            return speed_lesson(journal, record, speed)
        return [
            Learned(time_seconds=journal.now(), job_id=job_id, work="w", gpus=(),
                    estimated_samples_per_second=1.0, measured_samples_per_second=math.inf)
        ]  # fmt: skip

    monkeypatch.setattr(runs, "speed_lesson", poisoned)
    with running(tmp_path / "s") as system:
        bad, good = system.submit(steps=40), system.submit(steps=40)

        assert system.wait_over(bad, good) == ["done", "done"]
        assert "Progressed" in system.kinds(good)
        assert "Progressed" not in system.kinds(bad)
        assert system.controller.last_error == ""
        assert system.controller.reconciler.troubles.num_in_all


@pytest.mark.parametrize("way", ["os.mkfifo(path)", "path.symlink_to('/dev/zero')"])
def test_an_order_that_a_job_has_put_there_for_itself_is_not_waited_for(tmp_path, way):
    """The next launch of the job finds it where its own order should be."""
    script = tmp_path / "evil.py"
    script.write_text(
        "import os, pathlib, signal\n"
        "if os.environ['DRYSTONE_EPOCH'] == '1':\n"
        "    folder = pathlib.Path(os.environ['DRYSTONE_CHECKPOINTS']).parent / 'epoch-2'\n"
        "    folder.mkdir()\n"
        "    for path in (folder / 'launch.json', folder / '.launch.json.part'):\n"
        f"        {way}\n"
        "    os.kill(os.getpid(), signal.SIGKILL)\n"
    )
    with running(tmp_path / "s") as system:
        evil = system.submit(command=f"python {script}")
        decent = system.submit(steps=20, seconds=0.05)

        assert system.wait_over(decent, seconds=60) == ["done"]
        system.until(lambda: system.live.state.jobs[evil].num_starts >= 2, seconds=60)
        assert system.wait_over(evil, seconds=60) == ["done"]
