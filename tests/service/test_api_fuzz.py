"""Nothing that is sent makes the API fail: every answer is a reasoned one."""

import json

import pytest
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st
from systems import CLUSTER

from drystone.describe.files.cluster import parse_cluster
from drystone.describe.files.job_parts import GpuPart, JobPart, TrainPart
from drystone.run.control.controller import Controller, ControllerSettings
from drystone.service.app import make_app

testclient = pytest.importorskip("fastapi.testclient")
pytestmark = pytest.mark.slow

PLAIN = st.recursive(
    st.none() | st.booleans() | st.integers() | st.floats() | st.text(max_size=12),
    lambda inner: st.lists(inner, max_size=3) | st.dictionaries(st.text(max_size=6), inner),
    max_leaves=6,
)
WORDS = st.sampled_from(
    ["gpt2", "mini-gpt", "mini-gpt\0", "../x.json", "x.py:f", "\0.json", "6h", "2B", "a.bin",
     "true", "fp32", "A100", "é" * 300, "/", "~nobody/config.json", "1e18", 1, 10**30]
)  # fmt: skip


def part(model) -> st.SearchStrategy:
    return st.dictionaries(st.sampled_from(list(model.model_fields)), PLAIN | WORDS, max_size=5)


TRAIN = part(TrainPart).map(lambda given: {"steps": 3} | given)
JOBS = st.builds(
    lambda job, train, gpus: {"model": "mini-gpt", "train": train, "gpus": gpus} | job,
    part(JobPart), TRAIN | PLAIN, part(GpuPart) | PLAIN,
)  # fmt: skip
BODIES = st.fixed_dictionaries(
    {},
    optional={"job": JOBS | PLAIN, "text": st.text(max_size=80) | PLAIN, "folder": WORDS | PLAIN,
              "owner": PLAIN, "client_key": WORDS | PLAIN, "surplus": PLAIN},
)  # fmt: skip


@pytest.fixture(scope="module")
def client(tmp_path_factory):
    """Without the loop: jobs are taken in and never started."""
    settings_ = ControllerSettings(
        folder=tmp_path_factory.mktemp("fuzz") / "s", cluster=parse_cluster(CLUSTER)
    )
    controller = Controller(settings_)
    with testclient.TestClient(
        make_app(controller), base_url="http://localhost", raise_server_exceptions=True
    ) as made:
        yield made
    controller.close()


def check(answer) -> None:
    assert answer.status_code < 500, answer.text
    if answer.status_code >= 400:
        assert answer.json().get("error", {}).get("message") or "detail" in answer.json()


@settings(suppress_health_check=[HealthCheck.function_scoped_fixture], max_examples=300)
@given(BODIES | PLAIN, st.sampled_from(["/v1/jobs", "/v1/plan"]))
def test_any_body_is_answered(client, body, path):
    text = json.dumps(body)
    check(client.post(path, content=text, headers={"Content-Type": "application/json"}))


@settings(suppress_health_check=[HealthCheck.function_scoped_fixture], max_examples=200)
@given(
    st.sampled_from(["", "/why", "/logs", "/cancel", "/pause", "/resume"]),
    st.text(max_size=20) | st.sampled_from(["1", "2", "..", "%2e%2e", "1\0"]),
    st.dictionaries(
        st.sampled_from(["rank", "epoch", "offset", "stream", "after", "most", "state", "wait"]),
        st.sampled_from(["0", "-1", "1", "x", "9" * 30, "1.5", "log", "", "\0"]),
        max_size=3,
    ),
)
def test_any_path_and_query_is_answered(client, tail, name, query):
    from urllib.parse import quote

    query = {key: value for key, value in query.items() if key != "wait"}
    check_loosely(client.get(f"/v1/jobs/{quote(name, safe='')}{tail}", params=query))
    check_loosely(client.post(f"/v1/jobs/{quote(name, safe='')}{tail}"))
    for path in ("/v1/jobs", "/v1/events", "/v1/cluster", "/v1/health"):
        check_loosely(client.get(path, params=query))
    check_loosely(client.post(f"/v1/nodes/{quote(name, safe='')}/drain"))


def check_loosely(answer) -> None:
    assert answer.status_code < 500, answer.text
