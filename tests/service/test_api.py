"""The API and the commands over a real socket, with scripts as jobs."""

import json
import threading
import time

import pytest
import uvicorn
from systems import TRAINER, Running, running

from drystone.cli.main import run
from drystone.errors import DrystoneError, NothingFits, RequestError
from drystone.service.app import make_app
from drystone.service.client import Client, NotRunning
from drystone.service.server import listen

pytestmark = pytest.mark.slow


@pytest.fixture(scope="module")
def served(tmp_path_factory):
    """A system whose API answers on its socket."""
    with running(tmp_path_factory.mktemp("served") / "s") as system:
        config = uvicorn.Config(make_app(system.controller), log_level="error", lifespan="off")
        server, listener = uvicorn.Server(config), listen(system.folder)
        thread = threading.Thread(target=server.run, kwargs={"sockets": [listener]})
        thread.start()
        yield system
        server.should_exit = True
        thread.join()
        listener.close()


@pytest.fixture
def client(served):
    with Client(served.folder) as made:
        yield made


POOR = {"model": "mini-gpt", "train": {"steps": 900, "batch": 8}, "max_cost": 1e-6}


def body(steps: int = 10, seconds: float = 0.03, **more) -> dict:
    job = {
        "command": f"python {TRAINER}",
        "train": {"steps": steps, "batch": 4},
        "gpus": {"max": 1},
        "environment": {"STEP_SECONDS": str(seconds), "TOKEN": "secret"},
    }
    return {"job": job | more, "folder": "/tmp"}


def wait_over(client: Client, job_id: str) -> dict:
    deadline = time.monotonic() + 60
    while True:
        job = client.get(f"/v1/jobs/{job_id}")
        if job["state"] not in ("queued", "running"):
            return job
        assert time.monotonic() < deadline, job
        time.sleep(0.05)


def test_a_job_goes_through_the_api(client, served: Running):
    planned = client.post("/v1/plan", body())
    assert planned["steps"] == 10
    assert {frozenset(one["gpus"].items()) for one in planned["options"]} == {
        frozenset({("A100-80GB-SXM", 1)}), frozenset({("T4-16GB", 1)}),
    }  # fmt: skip
    made = client.post("/v1/jobs", body() | {"client_key": "once"})
    assert made["is_new"]
    assert client.post("/v1/jobs", body() | {"client_key": "once"}) == made | {"is_new": False}
    job = wait_over(client, made["id"])

    assert (job["state"], job["step"], job["num_steps"]) == ("done", 10, 10)
    assert job["progress"] == 1.0
    assert job["dollars"] > 0
    assert len(job["launches"]) == 1
    assert [one[0] for one in job["curve"]] == list(range(1, 11))
    assert made["id"] in [one["id"] for one in client.get("/v1/jobs")["jobs"]]
    assert client.get("/v1/jobs", state=["failed"])["total"] == 0
    events = client.get("/v1/events", job=made["id"])["events"]
    assert [one["event"] for one in events][-1] == "Finished"
    assert client.get(f"/v1/jobs/{made['id']}/why")["sentence"] == "It is done."


def test_secrets_are_not_shown(client):
    made = client.post("/v1/jobs", body())
    wait_over(client, made["id"])

    for path in (f"/v1/jobs/{made['id']}", "/v1/events", f"/v1/jobs/{made['id']}/why"):
        assert "secret" not in json.dumps(client.get(path))
    assert client.get(f"/v1/jobs/{made['id']}")["description"]["environment"] == [
        "STEP_SECONDS", "TOKEN",
    ]  # fmt: skip


def test_waiting_is_explained(client, served: Running):
    jobs = [client.post("/v1/jobs", body(steps=100))["id"] for _ in range(5)]
    served.until(lambda: client.get("/v1/jobs", state=["running"])["total"] == 4)
    served.until(
        lambda: all(one["phase"] == "training" for one in
                    client.get("/v1/jobs", state=["running"])["jobs"])
    )  # fmt: skip
    [waiting] = client.get("/v1/jobs", state=["queued"])["jobs"]
    why = client.get(f"/v1/jobs/{waiting['id']}/why")
    cluster = client.get("/v1/cluster")

    assert (why["position"], why["num_waiting"]) == (1, 1)
    assert "No GPUs that suffice are free" in why["sentence"]
    assert set(why["blocking"]) < set(jobs)
    assert why["expected_start_seconds"] > time.time() - 1
    assert why["ahead"] == []
    assert "it should start in" in why["sentence"]
    assert [one["free"] for one in cluster["nodes"]] == [0, 0]
    assert all(node["is_emulated"] and all(node["devices"]) for node in cluster["nodes"])
    for job in jobs:
        if client.get(f"/v1/jobs/{job}")["state"] in ("queued", "running"):
            client.post(f"/v1/jobs/{job}/cancel")


@pytest.mark.parametrize(
    ("path", "sent", "kind"),
    [
        ("/v1/jobs", {}, RequestError),
        ("/v1/jobs", {"job": {"model": "gpt2"}, "text": "x"}, RequestError),
        ("/v1/jobs", {"job": {"modle": "gpt2"}}, RequestError),
        ("/v1/jobs", {"text": "model: [", "surplus": 1}, RequestError),
        ("/v1/jobs", {"text": "model: ["}, RequestError),
        ("/v1/jobs", {"job": {"model": "gpt2", "train": {"steps": 1}}, "folder": ""}, RequestError),
        ("/v1/jobs", {"job": {"model": "llama-3-70b", "train": {"steps": 1}}}, NothingFits),
        ("/v1/plan", {"job": {"model": "llama-3-70b", "train": {"steps": 1}}}, NothingFits),
        ("/v1/jobs", {"job": {"model": "mixtral-8x7b", "train": {"steps": 1}}}, RequestError),
        ("/v1/plan", {"job": {"model": "bert-base-cased", "train": {"steps": 1}}}, RequestError),
        ("/v1/plan", {"job": POOR}, NothingFits),
        ("/v1/jobs", {"job": POOR}, NothingFits),
        ("/v1/jobs/77/cancel", None, RequestError),
        ("/v1/jobs/..%2f..%2fx/cancel", None, DrystoneError),
        ("/v1/nodes/77/drain", None, RequestError),
    ],
)  # fmt: skip
def test_what_is_wrong_is_refused_with_a_reason(client, path, sent, kind):
    with pytest.raises(kind) as caught:
        client.post(path, sent)
    assert caught.value.message


def test_a_plan_chooses_what_the_money_allows(client):
    job = {"model": "mini-gpt", "train": {"steps": 900, "batch": 8, "sequence": 32}}
    free = client.post("/v1/plan", {"job": job})
    cheapest, second = sorted(free["options"], key=lambda one: one["dollars"])[:2]
    assert free["chosen"]["gpus"] != cheapest["gpus"]

    between = (cheapest["dollars"] + second["dollars"]) / 2
    poor = client.post("/v1/plan", {"job": job | {"max_cost": between}})

    assert poor["chosen"] == cheapest


def test_waiting_for_events_ends_with_the_next_one(client, served: Running):
    last = client.get("/v1/health")["last_sequence"]
    assert client.get("/v1/events", after=last, wait=0.1)["events"] == []
    later = threading.Timer(0.2, lambda: served.controller.undrain("t4-1"))
    later.start()
    found = client.get("/v1/events", after=last, wait=20)["events"]
    later.join()

    assert "Undrained" in [one["event"] for one in found]


def test_the_commands_say_what_the_api_says(client, served: Running, capsys, tmp_path):
    folder = ["--folder", str(served.folder)]
    path = tmp_path / "mine.yaml"
    path.write_text(f"command: python {TRAINER}\ntrain: {{steps: 8, batch: 4}}\ngpus: {{max: 1}}\n")
    assert run(["submit", str(path), "-y", *folder]) == 0
    assert "8 steps of python" in capsys.readouterr().out
    job = client.get("/v1/jobs", most=100_000)["jobs"][-1]
    assert (job["name"], job["state"] in ("queued", "running", "done")) == ("mine", True)
    wait_over(client, job["id"])
    for verb in ("show", "why", "logs"):
        assert run([verb, job["id"], *folder]) == 0
    assert "step 8 of 8" in capsys.readouterr().out
    told = []
    for plain_or_not in (folder, [f"--folder={served.folder}"]):
        assert run(["why", job["id"], *plain_or_not]) == 0
        told.append(capsys.readouterr().out)
    assert told[0] == told[1]
    assert told[0].startswith("It is done.\nLast decision: Start")
    assert run(["why", job["id"], "--json", *folder]) == 0
    assert json.loads(capsys.readouterr().out)["sentence"] == "It is done."
    assert run(["jobs", "--json", *folder]) == 0
    assert json.loads(capsys.readouterr().out)["is_emulated"]
    for verb in (["jobs"], ["cluster"], ["top", "--once"]):
        assert run([*verb, *folder]) == 0
    assert "emulated" in capsys.readouterr().err
    assert run(["drain", "t4-1", *folder]) == 0
    assert run(["cluster", *folder]) == 0
    assert "drained" in capsys.readouterr().out
    assert run(["drain", "t4-1", "--undo", *folder]) == 0
    assert run(["cancel", job["id"], *folder]) == 2
    assert "done and cannot be cancelled" in capsys.readouterr().err
    assert run(["submit", str(path), *folder]) == 2  # nobody can be asked
    assert run(["submit", "--model", "gpt2", *folder]) == 2
    assert "how much to train" in capsys.readouterr().err


def test_without_a_controller_the_commands_say_what_to_do(tmp_path, capsys):
    with pytest.raises(NotRunning), Client(tmp_path) as made:
        made.get("/v1/health")
    for command in (["jobs"], ["why", "1"]):
        assert run([*command, "--folder", str(tmp_path)]) == 1
        assert "drystone serve" in capsys.readouterr().err


def test_a_job_is_found_by_its_name(client, served: Running, capsys):
    first = client.post("/v1/jobs", body(3, name="by-name"))["id"]
    wait_over(client, first)
    folder = ["--folder", str(served.folder)]

    assert run(["wait", "by-name", *folder]) == 0
    assert run(["show", "by-name", "--json", *folder]) == 0
    assert json.loads(capsys.readouterr().out)["id"] == first
    second, third = (client.post("/v1/jobs", body(400, name="by-name"))["id"] for _ in range(2))
    assert run(["cancel", "by-name", *folder]) == 2  # which of the two?
    assert second in capsys.readouterr().err
    assert run(["cancel", second, third, *folder]) == 0
    assert run(["wait", second, *folder]) == 1  # it did not get done
    assert run(["show", "nobody", *folder]) == 2


def test_events_are_told_in_sentences(client, served: Running, capsys):
    job = client.post("/v1/jobs", body(3, name="told"))["id"]
    wait_over(client, job)

    assert run(["events", "told", "--folder", str(served.folder)]) == 0
    lines = capsys.readouterr().out.splitlines()
    assert any(line.endswith(f"Job {job} was submitted, by owner") for line in lines)
    assert lines[-1].endswith(f"Job {job} is done")


def test_a_deadline_in_the_past_is_refused(client):
    with pytest.raises(RequestError, match="ago"):
        client.post("/v1/jobs", body(3, deadline="2020-01-01T00:00"))


def test_jobs_are_sorted_by_what_is_asked_for(client, served: Running, capsys):
    for steps in (3, 9):
        wait_over(client, client.post("/v1/jobs", body(steps))["id"])
    folder = ["--folder", str(served.folder)]

    assert run(["jobs", "--sort", "cost", "--json", *folder]) == 0
    costs = [job["dollars"] for job in json.loads(capsys.readouterr().out)["jobs"]]
    assert costs == sorted(costs, reverse=True)
    assert len(set(costs)) > 1
    assert run(["jobs", "--sort", "colour", *folder]) == 2
