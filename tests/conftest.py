"""Settings for every test."""

import itertools
import os
import re
import shutil
import signal
import socket
import subprocess
import tempfile
import time
from collections import Counter
from pathlib import Path

import pytest
from hypothesis import settings

from drystone.describe import catalogue

# The same examples on every machine, and no failure because a machine is slow.
settings.register_profile("drystone", derandomize=True, deadline=None, max_examples=100)
settings.load_profile("drystone")

# Their files hold a service, a browser or a cluster each, which one worker is to start.
_TOGETHER = ("engines", "page", "service")
# Daemons that others wrote: what they do on a machine that stands still is no fault of ours.
_DAEMONS = ("Ray", "Slurm", "PostgreSQL", "Chromium")
_LEFT_OUT = "left out: "  # how the reason of a skip begins that somebody could do something about
# Their tests are long and need nothing of each other.
_ONE_BY_ONE = ("accuracy", "golden", "oracles", "properties", "runtime")


def pytest_addoption(parser):
    parser.addoption(
        "--device",
        choices=("cpu", "cuda"),
        default="cpu",
        help="where the tests of the runtime train; on GPUs with NCCL (tests/gpu/README.md)",
    )


def pytest_configure(config):
    """On a machine with GPUs the suite does not touch them, unless it is told to."""
    # A shell makes what it puts in the background deaf to Ctrl-C, and with it all that we start.
    signal.signal(signal.SIGINT, signal.default_int_handler)
    if config.getoption("--device") == "cpu":
        os.environ["CUDA_VISIBLE_DEVICES"] = ""
    else:
        os.environ["DRYSTONE_TEST_DEVICE"] = "cuda"


@pytest.hookimpl(wrapper=True)
def pytest_xdist_auto_num_workers(config):
    """With the slow tests one more than processors: a third of their time they only wait."""
    number = yield
    is_told = "PYTEST_XDIST_AUTO_NUM_WORKERS" in os.environ
    return number + (not is_told and config.getoption("markexpr") != "not slow")


@pytest.hookimpl(tryfirst=True)  # before pytest-xdist looks for groups
def pytest_collection_modifyitems(config, items):
    has_told = config.getoption("reruns", None) is not None  # `--reruns 0`: see every failure
    for item in items:
        _allow_second_try(item, has_told=has_told)
        # Small tests go out by the file: handing out each one takes longer than most of them.
        is_free = item.get_closest_marker("xdist_group") is None
        if is_free and item.path.parent.name not in _ONE_BY_ONE:
            item.add_marker(pytest.mark.xdist_group(item.path.stem))
    if getattr(config.option, "loadgroup", False):
        _longest_first(items)


def _allow_second_try(item, *, has_told):
    """Only a test that starts somebody else's daemons may fail once, and it says which."""
    mark = item.get_closest_marker("second_try")
    if mark is None:
        return
    (daemon,) = mark.args
    if daemon not in _DAEMONS:
        raise pytest.UsageError(f"{item.nodeid}: second_try({daemon!r}) is none of {_DAEMONS}")
    item.user_properties.append(("second_try", daemon))
    if not has_told:
        item.add_marker(pytest.mark.flaky(reruns=1))


def pytest_terminal_summary(terminalreporter):
    """What failed once and then passed, and what was left out here, a line each."""
    for report in terminalreporter.stats.get("rerun", ()):
        daemon = dict(report.user_properties).get("second_try", "nobody")
        terminalreporter.write_line(f"SECOND TRY {report.nodeid} (because of {daemon})")
    skipped = terminalreporter.stats.get("skipped", ())
    reasons = Counter(reason for report in skipped if (reason := _left_out(report)))
    for reason, number in sorted(reasons.items()):
        terminalreporter.write_line(f"{number} skips: {reason}")


def _left_out(report):
    """Why, where installing something or being root would help; empty where a skip is by design."""
    reason = str(report.longrepr[2] if isinstance(report.longrepr, tuple) else "")
    if missing := re.search("could not import '([a-z_]+)", reason):
        return f"left out: no {missing[1]} here (make setup)"
    return reason.removeprefix("Skipped: ") if _LEFT_OUT in reason else ""


def _longest_first(items):
    """Slow groups first, those that wait and those that compute in turn; small tests last.

    Workers take groups in this order (`--no-loadscope-reorder`): what takes minutes must not begin
    when all else has ended, and the small ones fill up the end. Groups with a service, a browser or
    a cluster wait most of their time, so something that computes is to run beside them. Those of
    them that really train take longest.
    """
    ranks = {}
    for item in items:
        is_slow = item.get_closest_marker("slow") is not None
        rank = (0 if item.path.parent.name in _TOGETHER else 1) if is_slow else 2
        group = _group(item)
        ranks[group] = min(rank, ranks.get(group, rank))
    trains = {_group(item) for item in items if item.get_closest_marker("torch")}
    places = {}
    for rank in range(3):
        groups = [group for group in ranks if ranks[group] == rank]
        if rank == 0:
            groups.sort(key=lambda group: group not in trains)
        for index, group in enumerate(groups):
            places[group] = (rank == 2, index / len(groups), rank)
    items.sort(key=lambda item: places[_group(item)])


def _group(item):
    mark = item.get_closest_marker("xdist_group")
    return mark.args[0] if mark else item.nodeid


@pytest.fixture(autouse=True)
def _no_own_gpus(monkeypatch):
    """GPU types that a test's files describe are known in that test alone."""
    own = {}
    monkeypatch.setattr(catalogue, "_OWN", own)
    yield
    if own:  # making the table anew for every test takes seconds in all
        catalogue._gpus_by_key.cache_clear()


@pytest.fixture(scope="module")
def postgres(postgres_server):
    """Makes an empty database in a real server, and says its URL; each caller has its own."""
    import sqlalchemy as sa

    numbers = itertools.count(1)

    def make() -> str:
        name = f"test_{next(numbers)}"
        engine = sa.create_engine(postgres_server, isolation_level="AUTOCOMMIT")
        with engine.connect() as connection:
            connection.exec_driver_sql(f"CREATE DATABASE {name}")
        engine.dispose()
        return postgres_server.removesuffix("/postgres") + f"/{name}"

    return make


@pytest.fixture(scope="module")
def postgres_server(tmp_path_factory):
    """A real server of one's own; it refuses to run as root, so it gets another user there."""
    if shutil.which("initdb") is None or shutil.which("postgres") is None:
        pytest.skip("left out: no PostgreSQL here (apt-get install postgresql, its bin on PATH)")
    folder = tmp_path_factory.mktemp("postgres")
    user = []
    if os.getuid() == 0:
        if shutil.which("runuser") is None:
            pytest.skip("left out: PostgreSQL does not run as root (apt-get install util-linux)")
        user = ["runuser", "-u", "nobody", "--"]
        shared = Path(tempfile.gettempdir()).resolve()
        for one in (folder, *folder.parents):
            if shared not in one.resolve().parents:
                break  # what is above is not ours
            one.chmod(0o777)
    data = folder / "data"
    made = subprocess.run(
        [*user, "initdb", "-D", str(data), "-U", "test", "-A", "trust"],
        capture_output=True, text=True, check=False, cwd=folder,
    )  # fmt: skip
    if made.returncode:
        pytest.skip(f"left out: PostgreSQL cannot be set up here: {made.stderr[-300:]}")
    with (folder / "log").open("w") as log:
        server, url = _start_postgres(user, data, log)
    yield url
    server.terminate()
    server.wait(timeout=30)


def _start_postgres(user, data, log, seconds=120.0):
    """The server and its URL, once it answers; on another port if somebody has taken this one."""
    import psycopg

    deadline, server = time.monotonic() + seconds, None
    while time.monotonic() < deadline:
        if server is None or server.poll() is not None:
            with socket.socket() as probe:
                probe.bind(("127.0.0.1", 0))
                port = probe.getsockname()[1]
            server = subprocess.Popen(
                [
                    *user, "postgres", "-D", str(data), "-p", str(port),
                    "-k", str(data.parent), "-h", "127.0.0.1",
                ],
                stdout=log, stderr=log, cwd=data.parent, start_new_session=True,
            )  # fmt: skip
        try:
            psycopg.connect(
                f"postgresql://test@127.0.0.1:{port}/postgres", connect_timeout=10
            ).close()
        except psycopg.OperationalError:
            time.sleep(0.2)
        else:
            return server, f"postgresql+psycopg://test@127.0.0.1:{port}/postgres"
    server.terminate()
    raise RuntimeError(f"PostgreSQL does not answer: {Path(log.name).read_text()[-1000:]}")
