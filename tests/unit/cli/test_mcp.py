"""`drystone mcp`, asked over standard input and output by the client of the protocol's own SDK."""

import asyncio
import os
import sys
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path

import pytest

mcp = pytest.importorskip("mcp")

from mcp import Client, StdioServerParameters  # noqa: E402

READING = {"plan", "estimate", "why", "jobs", "simulate"}
WRITING = {"submit", "cancel", "pause", "resume"}
EXAMPLES = Path(__file__).parents[3] / "examples"


def run_apart(conversation):
    """In a thread of its own: Playwright leaves a running loop in that of the tests."""
    with ThreadPoolExecutor(1) as pool:
        return pool.submit(asyncio.run, conversation).result()


def ask(folder, calls, *flags, **variables):
    """The tools there are, and the answer of each call: (whether it is an error, its text)."""

    async def conversation():
        server = StdioServerParameters(
            command=sys.executable,
            args=["-P", "-m", "drystone", "mcp", *flags],
            env=dict(os.environ) | {"DRYSTONE_FOLDER": str(folder)} | variables,
        )
        async with Client(server) as client:
            tools = (await client.list_tools()).tools
            answers = []
            for name, arguments in calls:
                result = await client.call_tool(name, arguments)
                answers.append((result.is_error, "".join(part.text for part in result.content)))
            return {tool.name: tool for tool in tools}, answers

    return run_apart(conversation())


@pytest.mark.slow
def test_an_assistant_plans_and_estimates_and_simulates(tmp_path):
    tools, answers = ask(
        tmp_path,
        [
            ("plan", {"model": "gpt2-xl", "gpus": "2xA100-80G", "limit": 1}),
            ("estimate", {"model": "gpt2-xl", "gpu": "T4", "layout": "dp=1,micro=8"}),
            ("plan", {"config": str(EXAMPLES / "configs/axolotl.yaml"), "gpus": "4xA100-80G"}),
            (
                "simulate",
                {
                    "trace": str(EXAMPLES / "simulate/jobs.csv"),
                    "cluster": str(EXAMPLES / "simulate/cluster.yaml"),
                    "policy": "fifo",
                },
            ),
        ],
    )
    assert set(tools) == READING
    assert all(tool.annotations.read_only_hint for tool in tools.values())
    assert [is_error for is_error, _ in answers] == [False] * 4
    planned, estimated, from_config, simulated = (text for _, text in answers)
    assert "A100-80GB-SXM" in planned
    assert "\x1b" not in planned
    assert "does not fit" in estimated.lower()
    assert from_config.startswith("The axolotl config as it is: fits")
    assert "fifo" in simulated


@pytest.mark.slow
def test_wrong_requests_are_told_and_nothing_of_a_model_is_run(tmp_path):
    module = tmp_path / "trap.py"
    module.write_text("open('ran', 'w').close()\ndef build():\n    pass\n")
    _, answers = ask(
        tmp_path,
        [
            ("plan", {"model": "gpt2-xll", "gpus": "2xA100-80G"}),
            ("estimate", {"model": f"{module}:build", "gpu": "T4"}),
            ("plan", {"model": "--save=stolen.json", "gpus": "2xA100-80G"}),
            ("jobs", {}),
        ],
    )
    assert all(is_error for is_error, _ in answers)
    misspelt, python, option, nobody = (text for _, text in answers)
    assert "gpt2-xl" in misspelt
    assert "exit code 2" in misspelt
    assert "no Python functions" in python
    assert not (tmp_path / "ran").exists()
    assert "--save=stolen.json" in option  # taken for the name of a model
    assert not Path("stolen.json").exists()
    assert "drystone serve" in nobody


def test_writing_needs_a_flag_and_a_token(tmp_path, monkeypatch, capsys):
    from drystone.cli.main import run
    from drystone.cli.mcp import make_server

    monkeypatch.delenv("DRYSTONE_TOKEN", raising=False)
    assert run(["mcp", "--allow-writes"]) == 2
    assert "DRYSTONE_TOKEN" in capsys.readouterr().err

    async def names(**settings):
        async with Client(make_server(**settings)) as client:
            return {tool.name for tool in (await client.list_tools()).tools}

    assert run_apart(names(allows_writes=False)) == READING
    assert run_apart(names(allows_writes=True)) == READING | WRITING
