"""`jobs` and `why`: the plain way in and the one through Typer ask and print the same."""

from typing import Any

import pytest

from drystone.cli import quick
from drystone.cli.main import _run_app, run
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
        ["why", "a/b", "--folder", "/somewhere", "--json"],
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
