"""What the views are given: spans, prices, curves, plans, lists; and the files of the page."""

import json
from itertools import pairwise

import pytest
import worlds
from fastapi.testclient import TestClient

from drystone.service.app import make_app
from drystone.service.page.curves import life_of, put, read_picture, read_reports, shown, thin_out
from drystone.service.page.routes import assets
from drystone.service.views import Launch


def line(event: str, at: float, **more) -> str:
    return json.dumps({"event": event, "time_seconds": at, **more})


LIFE = [
    line("Submitted", 0.0, job={"id": "1"}),
    line("Started", 10.0, reason="worth most"),
    line("Launched", 11.0, plan="2 A100", devices=[["a", 0], ["a", 1]], epoch=1),
    line("Progressed", 15.0),
    line("Progressed", 20.0),
    line("Stopped", 30.0, reason="resized\nand more"),
    line("Started", 30.0),
    line("Launched", 31.0, plan="1 T4", devices=[["t", 0]], epoch=2),
    line("Progressed", 33.0),
    line("Interrupted", 40.0, reason="crash"),
    line("Paused", 41.0),
    line("Unpaused", 50.0),
    line("Cancelled", 60.0),
]


def test_a_life_is_told_in_spans_without_gaps():
    spans = life_of(LIFE, {"a": "A100", "t": "T4"})

    assert [one["state"] for one in spans] == [
        "queued", "planned", "starting", "running", "queued", "planned", "starting", "resized",
        "queued", "paused", "queued", "cancelled",
    ]  # fmt: skip
    assert all(a["end_seconds"] == b["start_seconds"] for a, b in pairwise(spans))
    assert spans[-1]["end_seconds"] is None
    assert spans[3]["gpus"] == {"A100": 2}
    assert spans[7]["gpus"] == {"T4": 1}
    assert spans[4]["reason"] == "resized"  # the first line; the end of a log may follow


def test_prices_keep_what_held_before_and_never_more_than_is_drawn():
    points: list[tuple[float, float]] = []
    for at, value in ((0.0, 1.0), (10.0, 1.0), (20.0, 2.0), (20.0, 3.0), (40.0, 5.0)):
        put(points, at, value)

    assert points == [(0.0, 1.0), (20.0, 3.0), (40.0, 5.0)]
    assert shown(points, 30.0) == [[20.0, 3.0], [40.0, 5.0]]
    many = [(float(at), float(at)) for at in range(10_000)]
    assert len(shown(many, 0.0, most=100)) == 100
    assert shown(many, 0.0, most=100)[-1] == [9999.0, 9999.0]


def test_reports_that_are_torn_or_strange_are_passed_over(tmp_path):
    path = tmp_path / "out"
    path.write_text(
        '{"event": "step", "step": 1, "loss": 2.5, "step_seconds": 0.1}\n'
        'hello\n{"event": "step", "step": true}\n{"event": "step", "step": 2, "loss": NaN}\n'
        '[1]\n{"event": "checkpoint", "step": 2}\n{"event": "step", "st'
    )

    assert read_reports(path) == [[1, 2.5, 0.1], [2, None, None]]
    assert read_reports(tmp_path / "none") == []
    assert thin_out(list(range(100)), 3) == [0, 50, 99]


def test_a_launch_without_a_plan_is_drawn_as_a_script(tmp_path):
    devices = [("t", 0), ("t", 1)]
    launch = Launch(epoch=1, plan="2 T4, own script", devices=devices, time_seconds=0.0)
    picture = read_picture(tmp_path, "1", launch, {"t": "T4"})

    assert picture["way"] == "script"
    assert [one["device"] for one in picture["stages"][0]["ranks"]] == [0, 1]
    assert picture["stages"][0]["ranks"][0]["batch"] is None


@pytest.fixture
def client(tmp_path):
    controller = worlds.open_controller(tmp_path / "s", worlds.EMULATED)
    with TestClient(make_app(controller), base_url="http://127.0.0.1") as made:
        made.controller = controller
        yield made
    controller.close()


def test_lists_count_all_groups_and_give_reasons(client):
    for name in ("one", "two", "three"):
        table = {"name": name, "model": "mini-gpt", "train": {"steps": 9, "batch": 8}}
        worlds.submit(client.controller, worlds.Arrival(0.0, table, "ada"))
    client.controller.cancel("2")

    live = client.get("/v1/page/jobs").json()
    assert [one["name"] for one in live["jobs"]] == ["one", "three"]
    assert live["jobs"][1]["why"] == "number 2 of 2 that wait for GPUs"
    assert (live["counts"]["waiting"], live["counts"]["cancelled"], live["counts"]["all"]) == (
        2,
        1,
        3,
    )
    newest = client.get("/v1/page/jobs", params={"group": "all", "most": 1}).json()
    assert (newest["jobs"][0]["name"], newest["total"]) == ("three", 3)
    found = client.get("/v1/page/jobs", params={"group": "all", "search": "TW"}).json()
    assert [one["id"] for one in found["jobs"]] == ["2"]
    assert client.get("/v1/page/jobs/1").json()["job"]["timeline"][0]["state"] == "queued"
    assert client.get("/v1/page/jobs/99").status_code == 404
    assert client.get("/v1/page/types").json()["emulated"] == ["A100-80GB-SXM", "T4-16GB"]


def test_a_shared_document_is_made_anew_when_something_happened(client):
    before = client.get("/v1/page/overview").json()
    client.controller.drain(before["nodes"][0]["id"])

    assert not before["nodes"][0]["is_drained"]
    assert client.get("/v1/page/overview").json()["nodes"][0]["is_drained"]


@pytest.mark.parametrize("path", ["overview", "jobs", "jobs/1", "prices", "types"])
def test_documents_need_a_token_where_there_are_tokens(client, path):
    from drystone.run.control.access import make_token

    journal = client.controller.journal
    note, text = make_token(name="somebody", role="viewer", team="", now_seconds=journal.now())
    journal.commit([note])

    assert client.get(f"/v1/page/{path}").status_code == 401
    answer = client.get(f"/v1/page/{path}", headers={"Authorization": f"Bearer {text}"})
    assert answer.status_code in (200, 404)
    assert client.get("/").status_code == 200  # the page itself holds no data


def test_the_page_runs_no_scripts_but_its_own(client):
    answer = client.get("/")
    policy = answer.headers["content-security-policy"]

    assert "default-src 'none'" in policy
    assert "script-src 'self';" in policy
    assert "unsafe" not in policy
    for name in assets():
        found = client.get(f"/page/{name}")
        assert found.status_code == 200
        again = client.get(f"/page/{name}", headers={"If-None-Match": found.headers["etag"]})
        assert again.status_code == 304
    text = answer.text + "".join(one.body.decode() for one in assets().values())
    assert "//cdn" not in text
    assert "https://" not in text.replace("http://www.w3.org", "")


@pytest.mark.parametrize("name", ["../api.py", "%2e%2e/api.py", "..%2fapi.py", ".", "", "none.js"])
def test_nothing_but_the_pages_files_can_be_asked_for(client, name):
    assert client.get(f"/page/{name}").status_code == 404


def test_every_module_that_is_preloaded_is_there():
    index = assets()["index.html"].body.decode()
    wanted = [part.split('"')[0] for part in index.split('"/page/')[1:]]

    assert set(wanted) <= set(assets())
    modules = {name for name in assets() if name.endswith(".js")}
    assert modules <= set(wanted)
