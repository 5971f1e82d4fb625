"""Three programs as a provider: real processes that keep their nodes in a folder."""

import sys
import threading
import time
from pathlib import Path

import pytest

from drystone.describe.market import Offer
from drystone.errors import InvalidSpec, UnknownName
from drystone.run.renting.commands import CommandProvider
from drystone.run.renting.provider import ProviderTrouble, Stage

OFFER = Offer(
    name="t4", gpu="T4", num_gpus=4, price_dollars_per_hour=2.0, instance="g4dn", infra="here",
    is_spot=True,
)  # fmt: skip
TOKEN = "drystone-aa-bb-000007"

# A cloud: one file for each node, with what it was told. `list` prints a line for each.
CREATE = """
name = token if not (here / "fail").exists() else None
if name is None:
    print("quota", file=sys.stderr)
    sys.exit(int((here / "fail").read_text()))
(nodes / token).write_text(json.dumps({k: v for k, v in os.environ.items() if "DRYSTONE" in k}))
with (here / "made").open("a") as made:
    print(token, file=made)
"""
LIST = """
for path in sorted(nodes.iterdir()):
    if path.name.startswith(token):
        told = json.loads(path.read_text())
        row = {"token": path.name, "stage": "running", "offer": told["DRYSTONE_OFFER"]}
        print(json.dumps(row))
"""
DELETE = """
(nodes / token).unlink(missing_ok=True)
"""


def write_programs(folder: Path, **others: str) -> Path:
    folder.mkdir(exist_ok=True)
    (folder / "nodes").mkdir(exist_ok=True)
    for name, body in {"create": CREATE, "list": LIST, "delete": DELETE, **others}.items():
        head = (
            f"#!{sys.executable} -S\nimport json, os, sys, time\nfrom pathlib import Path\n"
            "here = Path(__file__).parent\nnodes, token = here / 'nodes', sys.argv[1]\n"
        )
        (folder / name).write_text(head + body)
        (folder / name).chmod(0o755)
    return folder


@pytest.fixture
def folder(tmp_path):
    return write_programs(tmp_path / "cloud")


def provider(folder: Path, **fields) -> CommandProvider:
    return CommandProvider(folder, (OFFER,), **fields)


def num_made(folder: Path) -> int:
    return len((folder / "made").read_text().split()) if (folder / "made").exists() else 0


def test_a_node_is_created_listed_and_deleted(folder):
    cloud = provider(folder, address="10.0.0.1:6379")
    cloud.rent(TOKEN, OFFER)

    (found,) = cloud.status("drystone-aa")
    assert (found.token, found.stage, found.offer) == (TOKEN, Stage.RUNNING, "t4")
    assert found.price_dollars_per_hour == 2.0
    assert found.since_seconds <= time.time()
    assert cloud.status("drystone-aa")[0].since_seconds == found.since_seconds
    assert cloud.status("drystone-cc") == []
    told = (folder / "nodes" / TOKEN).read_text()
    for part in ("rented-t4-0007", "10.0.0.1:6379", '"DRYSTONE_NUM_GPUS": "4"', "g4dn", "here"):
        assert part in told

    cloud.release(TOKEN)
    cloud.release(TOKEN)
    assert cloud.status("drystone-aa") == []


def test_asking_twice_is_asking_once_also_for_the_next_controller(folder):
    cloud = provider(folder)
    cloud.rent(TOKEN, OFFER)
    cloud.rent(TOKEN, OFFER)
    provider(folder).rent(TOKEN, OFFER)

    assert num_made(folder) == 1


def test_nothing_left_is_a_failure_of_that_rental_and_other_codes_are_trouble(folder):
    cloud = provider(folder)
    (folder / "fail").write_text("3")
    cloud.rent(TOKEN, OFFER)
    (found,) = cloud.status("drystone-aa")
    assert (found.stage, found.reason) == (Stage.FAILED, "quota")

    (folder / "fail").write_text("1")
    with pytest.raises(ProviderTrouble, match="`create` ended with 1: quota"):
        cloud.rent("drystone-aa-bb-000008", OFFER)
    (folder / "fail").unlink()
    cloud.rent("drystone-aa-bb-000008", OFFER)  # it may be tried again
    assert num_made(folder) == 1


@pytest.mark.parametrize(
    ("printed", "told"),
    [
        ("print('no json')", "no json"),
        ("print('{}')", "stage"),
        ("""print('{"token": "a", "stage": "happy"}')""", "happy"),
        ("""print('{"token": "a", "stage": "running", "prise": 1}')""", "prise"),
        ("""print('{"token": "a", "stage": "ended", "billed_dollars": -1}')""", "-1"),
        ("""print('{"token": "a", "stage": "running", "since_seconds": "NaN"}')""", "NaN"),
        ("print('[1]')", "list"),
        ("sys.exit('no network')", "no network"),
    ],
)
def test_a_list_that_cannot_be_read_is_trouble_and_not_an_empty_cloud(tmp_path, printed, told):
    cloud = provider(write_programs(tmp_path / "cloud", list=printed))

    with pytest.raises(ProviderTrouble, match=told):
        cloud.status("a")


def test_a_program_that_hangs_is_ended_with_all_that_it_started(tmp_path):
    hangs = "import subprocess\nsubprocess.Popen(['sleep', '60'])\ntime.sleep(60)"
    cloud = provider(write_programs(tmp_path / "cloud", list=hangs), wait_seconds=1.0)

    with pytest.raises(ProviderTrouble, match="did not end within 1 s"):
        cloud.status("a")


def test_a_node_that_was_made_twice_counts_while_one_of_them_runs(tmp_path):
    twice = """
print(json.dumps({"token": "a-1", "stage": "running", "price_dollars_per_hour": 1.5}))
print(json.dumps({"token": "a-1", "stage": "ended", "billed_dollars": 0.25}))
"""
    (found,) = provider(write_programs(tmp_path / "cloud", list=twice)).status("a")

    assert (found.stage, found.price_dollars_per_hour) == (Stage.RUNNING, 1.5)


def test_what_was_billed_is_read(tmp_path):
    over = """
print(json.dumps({"token": "a-1", "stage": "ended", "billed_dollars": 0.25, "reason": "spot"}))
"""
    (found,) = provider(write_programs(tmp_path / "cloud", list=over)).status("a")

    assert (found.billed_micro_dollars, found.reason) == (250_000, "spot")


def test_programs_and_offers_must_be_there(folder):
    with pytest.raises(UnknownName):
        provider(folder).rent(
            TOKEN, Offer(name="x", gpu="T4", num_gpus=1, price_dollars_per_hour=1)
        )
    (folder / "delete").chmod(0o644)
    with pytest.raises(InvalidSpec, match="no program `delete`"):
        provider(folder)


def test_many_threads_make_each_node_once(folder):
    cloud = provider(folder)
    tokens = [f"drystone-aa-bb-{number:06d}" for number in range(6)]
    threads = [threading.Thread(target=cloud.rent, args=(token, OFFER)) for token in tokens]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()

    assert sorted(rental.token for rental in cloud.status("drystone")) == tokens
    assert num_made(folder) == 6
