"""`drystone mcp` before a running service: reads with a viewer's token, changes as a token may."""

import asyncio
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path

import pytest
from services import serving

mcp = pytest.importorskip("mcp")

from drystone.cli.mcp import make_server  # noqa: E402

JOB = "name: asked\nmodel: mini-gpt\ntrain: {steps: 3, batch: 4, sequence: 16}\n"


def run_apart(conversation):
    """In a thread of its own: Playwright leaves a running loop in that of the tests."""
    with ThreadPoolExecutor(1) as pool:
        return pool.submit(asyncio.run, conversation).result()


def ask(calls):
    """The answer of each call: (whether it is an error, its text)."""

    async def conversation():
        async with mcp.Client(make_server(allows_writes=True)) as client:
            answers = [await client.call_tool(*call) for call in calls]
            return [(one.is_error, "".join(part.text for part in one.content)) for one in answers]

    return run_apart(conversation())


@pytest.mark.slow
def test_an_assistant_sees_jobs_and_changes_what_its_token_may(tmp_path: Path, monkeypatch):
    file = tmp_path / "job.yaml"
    file.write_text(JOB)
    with serving(tmp_path / "s") as service:
        service.team("red")
        first = service.submit(team="red", name="first")
        viewer, submitter = service.token("viewer", "red"), service.token("submitter", "red")
        monkeypatch.setenv("DRYSTONE_URL", service.url)
        monkeypatch.setenv("DRYSTONE_TOKEN", viewer)
        seen, asked, refused = ask(
            [("jobs", {}), ("why", {"job": "first"}), ("cancel", {"job": first})]
        )
        assert not seen[0]
        assert "first" in seen[1]
        assert not asked[0]
        assert asked[1]
        assert refused[0]
        assert service.controller.find(first).state == "queued"

        monkeypatch.setenv("DRYSTONE_TOKEN", submitter)
        submitted, cancelled = ask([("submit", {"file": str(file)}), ("cancel", {"job": "first"})])
        assert not submitted[0], submitted
        assert not cancelled[0], cancelled
        assert service.controller.find(first).state == "cancelled"
        with service.client(submitter) as client:
            names = {job["name"] for job in client.get("/v1/jobs")["jobs"]}
        assert names == {"first", "asked"}
