"""Submit a job to a running Drystone from Python, and follow it: `drystone.submit("job.yaml")`."""

from __future__ import annotations

import getpass
import os
import time
import uuid
from collections.abc import Mapping, Sequence
from dataclasses import replace
from pathlib import Path
from typing import Any, Final

from drystone.describe.families.huggingface import load_config
from drystone.describe.files.job import load_job, make_job
from drystone.describe.files.job_parts import TrainPart
from drystone.describe.files.reader import parse_yaml
from drystone.describe.trainable import refuse_untrainable
from drystone.errors import DrystoneError, InvalidSpec
from drystone.service.client import Client, NotRunning

OVER: Final = frozenset({"done", "failed", "refused", "cancelled"})
_WAIT_SECONDS: Final = 20.0  # that one request waits for an event; the service allows 30
_RETRY_SECONDS: Final = 0.5  # while nobody answers
_PAUSE_SECONDS: Final = 0.2  # between looks at least
_TRAIN_KEYS: Final = frozenset(TrainPart.model_fields)


class JobFailed(DrystoneError):
    """A job that was waited for ended without being done."""


class Submitted:
    """A job that was submitted. Letting go of it never ends the job."""

    def __init__(self, job_id: str, folder: Path | None = None) -> None:
        self.id = job_id
        self._folder = folder

    def __repr__(self) -> str:
        return f"<job {self.id}>"

    def details(self) -> dict[str, Any]:
        """The job as docs/api.md has it: step, loss, GPUs, end, dollars, reason and more."""
        return self._get(f"/v1/jobs/{self.id}")

    def state(self) -> str:
        """`queued`, `running`, `paused`, `done`, `failed`, `refused` or `cancelled`."""
        return str(self.details()["state"])

    def why(self) -> str:
        """Why it waits, or why it has what it has, in a sentence."""
        return str(self._get(f"/v1/jobs/{self.id}/why")["sentence"])

    def wait(self, timeout_seconds: float | None = None, *, must_be_done: bool = True) -> str:
        """Wait until the job is over; its state.

        One that ended otherwise than done raises `JobFailed` with the reason, unless `must_be_done`
        is false. When the time is over first, `TimeoutError`; the job goes on. A service that is
        restarted meanwhile is waited for.
        """
        deadline = None if timeout_seconds is None else time.monotonic() + timeout_seconds
        while True:
            left = _WAIT_SECONDS if deadline is None else max(deadline - time.monotonic(), 0.0)
            try:
                job = self._wait_for_news(min(left, _WAIT_SECONDS))
                if job["state"] in OVER:
                    return _ended(self.id, job, must_be_done=must_be_done)
            except NotRunning:
                time.sleep(min(_RETRY_SECONDS, left))
            if deadline is not None and time.monotonic() >= deadline:
                raise TimeoutError(f"job {self.id} is not over after {timeout_seconds:g} s")

    def _wait_for_news(self, seconds: float) -> dict[str, Any]:
        """The job, after something happened in the system unless the job is over already."""
        with Client(self._folder) as client:
            # Asked before the state: what happens in between is not waited for in vain.
            last = client.get("/v1/health")["last_sequence"]
            job = client.get(f"/v1/jobs/{self.id}")
            if job["state"] not in OVER and seconds > 0:
                time.sleep(min(_PAUSE_SECONDS, seconds))  # others may make news all the time
                client.get("/v1/events", after=last, most=1, wait=seconds)
                job = client.get(f"/v1/jobs/{self.id}")
            return job

    def cancel(self) -> None:
        """Take the job back; its last checkpoint stays."""
        self._post("cancel")

    def pause(self) -> None:
        """Let it write a checkpoint, give its GPUs back and wait."""
        self._post("pause")

    def resume(self) -> None:
        """Let a paused job run again."""
        self._post("resume")

    def _get(self, path: str) -> dict[str, Any]:
        with Client(self._folder) as client:
            return client.get(path)

    def _post(self, verb: str) -> None:
        with Client(self._folder) as client:
            client.post(f"/v1/jobs/{self.id}/{verb}")


def submit(
    job: str | os.PathLike[str] | Mapping[str, Any] | None = None,
    /,
    *,
    folder: str | os.PathLike[str] | None = None,
    client_key: str = "",
    **keys: Any,
) -> Submitted:
    """Submit a job: a file, a table of its keys, or the keys as arguments (docs/jobs.md).

    Keys of `train` may stand by themselves: `submit(model="mini-gpt", steps=100, batch=8)`. Paths
    in a file start at its folder, other ones here. `folder` is that of the running system. The same
    `client_key` never makes a second job, however often it is sent.
    """
    home = Path(folder).expanduser().absolute() if folder is not None else None
    body = _described(job, keys) | {
        "owner": getpass.getuser(),
        "client_key": client_key or uuid.uuid4().hex,
    }
    with Client(home) as client:
        return Submitted(str(client.post("/v1/jobs", with_files(client, body))["id"]), home)


def _described(
    job: str | os.PathLike[str] | Mapping[str, Any] | None, keys: Mapping[str, Any]
) -> dict[str, Any]:
    if job is not None and keys:
        given = ", ".join(sorted(keys))
        raise InvalidSpec(f"give a job or its keys as arguments, not both ({given})")
    here = Path.cwd()
    if isinstance(job, str | os.PathLike):
        return file_body(Path(job).expanduser())
    table = dict(job) if job is not None else _nested(keys)
    make_job(table, folder=here, knows_gpus=False)  # says what is wrong here
    return {"job": table, "folder": str(here)}


def file_body(file: Path) -> dict[str, Any]:
    """A job file as a request carries it; without a name in it, it gets the file's."""
    checked = load_job(file, knows_gpus=False)  # the service may have types of its own
    text = file.read_text(encoding="utf-8-sig")
    if "\nname:" not in f"\n{text}":
        text = f"name: {checked.name}\n{text}"
    return {"text": text, "folder": str(file.resolve().parent)}


def with_files(
    client: Client, body: dict[str, Any], include: Sequence[Path] = ()
) -> dict[str, Any]:
    """The same request for a service on another machine: what the job names here is sent there.

    Sent are the files that the command, `model` and `data` name by relative paths, and `include`
    (folders whole). Whole paths mean files on the other machine.
    """
    if not client.is_remote:
        return body
    home = Path(str(body["folder"]))
    table = parse_yaml(body["text"]).value if "text" in body else body["job"]
    words = [*str(table.get("command") or "").split(), table.get("model"), table.get("data")]
    named = [Path(str(name)) for name in words if name]
    found = {name.as_posix(): home / name for name in named if not name.is_absolute()}
    files = {name: path for name, path in found.items() if path.exists()}
    model = Path(str(table.get("model"))).as_posix()
    if model in files and not table.get("command"):
        shape = load_config(files[model])
        is_new = table.get("from") == "scratch"
        # Rather than after gigabytes were sent.
        refuse_untrainable(replace(shape, weights="") if is_new else shape)
    files |= {_relative(path, home): home / path for path in include}
    sent = {name: one for name, path in files.items() for name, one in _files(name, path)}
    if not sent:
        return body
    bundle = uuid.uuid4().hex
    for name, path in sorted(sent.items()):
        client.upload(bundle, name, path)
    return body | {"files": bundle}


def _relative(path: Path, home: Path) -> str:
    whole = (home / path).resolve()
    if not whole.is_relative_to(home.resolve()) or not whole.exists():
        raise InvalidSpec("is not there, or not in the job's folder", where=str(path))
    return whole.relative_to(home.resolve()).as_posix()


def _files(name: str, path: Path) -> list[tuple[str, Path]]:
    """A file by its name, or all that a folder holds."""
    if path.is_file():
        return [(name, path)]
    inside = sorted(file for file in path.rglob("*") if file.is_file())
    return [
        (f"{name}/{file.relative_to(path).as_posix()}".removeprefix("./"), file)
        for file in inside
        if not any(part.startswith((".", "__pycache__")) for part in file.relative_to(path).parts)
    ]


def _nested(keys: Mapping[str, Any]) -> dict[str, Any]:
    table = {key: value for key, value in keys.items() if key not in _TRAIN_KEYS}
    train = {key: value for key, value in keys.items() if key in _TRAIN_KEYS}
    if train:
        table["train"] = dict(table.get("train", {})) | train
    return table


def _ended(job_id: str, job: Mapping[str, Any], *, must_be_done: bool) -> str:
    state = str(job["state"])
    if must_be_done and state != "done":
        hint = f"`drystone logs {job_id}` shows what it wrote"
        reason = job["reason"] or "cancelled by its owner"
        raise JobFailed(f"job {job_id} is {state}: {reason}", hint=hint)
    return state
