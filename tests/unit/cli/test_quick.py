"""`jobs` and `why`: the plain way in and the one through Typer ask and print the same."""

from typing import Any

import pytest

from drystone.cli import quick
from drystone.cli.main import _run_app, run
from drystone.errors import InvalidSpec
from drystone.service import client

PAGE = {"jobs": [], "total": 0, "now_seconds": 0.0, "is_emulated": False}


@pytest.fixture
def asked(monkeypatch: pytest.MonkeyPatch) -> list[Any]:
    """What the service is asked for."""
    found: list[Any] = []

    class Service:
        def __init__(self, folder: Any = None) -> None:
            self.folder = folder

        def __enter__(self) -> "Service":
            return self

        def __exit__(self, *_: object) -> None:
            """Nothing is open."""

        def get(self, path: str, **query: Any) -> dict[str, Any]:
            found.append((self.folder, path, query))
            return PAGE

    monkeypatch.setattr(client, "Client", Service)
    return found


@pytest.mark.parametrize(
    "words",
    [
        ["jobs"],
        ["jobs", "--state", "running", "--state", "queued", "--owner", "ada", "--limit", "5"],
        ["jobs", "--most", "5", "--folder", "/somewhere", "--json"],
        ["why", "7", "--json"],
        ["why", "7", "--folder", "/somewhere", "--json"],
    ],
)
def test_both_ways_in_ask_and_print_the_same(words, asked, capsys):
    assert quick.run_quickly(words)
    plainly = capsys.readouterr()
    assert _run_app(words, debug=False) == 0

    assert capsys.readouterr() == plainly
    assert len(asked) == 2
    assert asked[0] == asked[1]


@pytest.mark.parametrize(
    "words", [["jobs", "--watch"], ["jobs", "--limit", "0"], ["jobs", "--help"], ["why"]]
)
def test_what_is_not_plain_is_left_to_typer(words, asked):
    assert not quick.run_quickly(words)
    assert asked == []


def test_a_limit_that_is_too_large_is_refused(asked):
    assert run(["jobs", "--limit", "100001"]) == 2
    assert asked == []


class Named:
    """A service with these jobs of one name."""

    def __init__(self, *jobs: tuple[str, str]) -> None:
        self.jobs = [{"id": number, "state": state} for number, state in jobs]

    def get(self, path: str, **query: Any) -> dict[str, Any]:
        assert (path, query["name"]) == ("/v1/jobs", "mine")
        return {"jobs": self.jobs}


def test_a_number_is_not_looked_up():
    assert quick.find_job(None, "7") == "7"


def test_of_several_jobs_of_a_name_the_one_alive_is_meant_else_the_newest():
    assert quick.find_job(Named(("9", "done"), ("8", "running"), ("7", "failed")), "mine") == "8"
    assert quick.find_job(Named(("9", "done"), ("7", "failed")), "mine") == "9"


def test_a_name_that_could_mean_two_jobs_or_none_is_refused():
    with pytest.raises(InvalidSpec, match="2 jobs") as refused:
        quick.find_job(Named(("9", "queued"), ("8", "running")), "mine")
    assert refused.value.hint == "Give a number: 9, 8"
    with pytest.raises(InvalidSpec, match="no job has this"):
        quick.find_job(Named(), "mine")
