"""`drystone.submit` from Python, against `drystone serve` as a process with emulated GPUs."""

import subprocess
import sys
import time
from pathlib import Path

import pytest
from systems import CLUSTER, TRAINER

import drystone
from drystone.errors import InvalidSpec, NothingFits, UnknownName
from drystone.service.client import Client, NotRunning
from drystone.service.submission import JobFailed, Submitted

pytestmark = pytest.mark.slow
EXAMPLES = Path(__file__).parents[2] / "examples"


@pytest.fixture(scope="module")
def folder(tmp_path_factory):
    """Of a running system."""
    made: Path = tmp_path_factory.mktemp("submission")
    (made / "c.yaml").write_text(CLUSTER)
    command = [sys.executable, "-m", "drystone", "serve", "--cluster", str(made / "c.yaml")]
    serve = subprocess.Popen(
        [*command, "--folder", str(made / "s"), "--end-all"], stderr=subprocess.DEVNULL
    )
    deadline = time.monotonic() + 60
    while not answers(made / "s"):
        assert time.monotonic() < deadline
        time.sleep(0.1)
    yield made / "s"
    serve.terminate()
    assert serve.wait(timeout=60) == 0


def answers(folder: Path) -> bool:
    with Client(folder) as client:
        try:
            return client.get("/v1/health")["status"] == "ok"
        except NotRunning:
            return False


def script(fault: str = "", seconds: float = 0.03) -> dict:
    return {
        "command": f"python {TRAINER}",
        "gpus": {"max": 1},
        "environment": {"FAULT": fault, "STEP_SECONDS": str(seconds)},
    }


def test_keywords_train_a_real_model_to_its_end(folder):
    job = drystone.submit(
        model="mini-gpt", steps=3, batch=4, sequence=16, gpus={"max": 1}, folder=folder
    )

    assert isinstance(job, Submitted)
    assert job.wait(120) == "done"
    details = job.details()
    assert (details["step"], details["state"], details["name"]) == (3, "done", "mini-gpt")
    assert job.state() == "done"


def test_a_file_keeps_its_folder_and_gives_its_name(folder, tmp_path):
    (tmp_path / "mine.yaml").write_text(
        f"command: python {TRAINER}\ntrain: {{steps: 3, batch: 4}}\ngpus: {{max: 1}}\n"
    )
    job = drystone.submit(str(tmp_path / "mine.yaml"), folder=folder)

    assert job.wait(60) == "done"
    assert job.details()["name"] == "mine"
    assert job.details()["description"]["folder"] == str(tmp_path)


def test_a_table_is_cancelled(folder):
    job = drystone.submit(script(seconds=1.0) | {"train": {"steps": 500}}, folder=folder)
    with pytest.raises(TimeoutError, match=f"job {job.id} is not over"):
        job.wait(0.5)
    job.cancel()

    assert job.wait(60, must_be_done=False) == "cancelled"
    with pytest.raises(JobFailed, match="cancelled"):
        job.wait(60)


def test_a_failure_is_raised_with_its_reason(folder):
    job = drystone.submit(**script(fault="bug"), steps=5, folder=folder)

    with pytest.raises(JobFailed) as failed:
        job.wait(60)
    assert str(failed.value).startswith(f"job {job.id} is failed: ")
    assert job.state() == "failed"


def test_the_same_key_is_the_same_job(folder):
    made = [
        drystone.submit(**script(), steps=2, client_key="one", folder=folder).id for _ in range(2)
    ]

    assert made[0] == made[1]


def test_what_is_wrong_is_said_before_anybody_is_asked(tmp_path):
    with pytest.raises(UnknownName, match="stepz"):
        drystone.submit(model="mini-gpt", stepz=3, folder=tmp_path)
    with pytest.raises(InvalidSpec, match="not both"):
        drystone.submit({"model": "mini-gpt"}, steps=3, folder=tmp_path)
    with pytest.raises(NotRunning):
        drystone.submit(model="mini-gpt", steps=3, folder=tmp_path)


def test_a_module_of_ones_own_is_trained_by_a_script_of_ones_own(folder):
    job = drystone.submit(
        command=f"python {EXAMPLES}/train_module.py",
        steps=3,
        batch=8,
        gpus={"min": 2, "max": 2, "allow": ["T4"]},
        folder=folder,
    )
    assert job.wait(180) == "done"
    details = job.details()
    assert (details["step"], len(details["launches"][-1]["devices"])) == (3, 2)
    saved = folder / "jobs" / job.id / "checkpoints"
    assert any(saved.iterdir())


def test_what_fits_nowhere_is_refused(folder):
    with pytest.raises(NothingFits):
        drystone.submit(model="llama-3-70b", steps=3, folder=folder)


def test_importing_drystone_stays_light():
    code = "import sys, drystone; print('pydantic' in sys.modules, callable(drystone.submit))"
    done = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, check=True)

    assert done.stdout.split() == ["False", "True"]
