"""What uneven batches gain, by replay of the engine's own log: exact."""

import sys
from pathlib import Path

import pytest

pytest.importorskip("torch")

sys.path.insert(0, str(Path(__file__).parent))
from engine_cases import SEQ_LEN, a_spec

from drystone.errors import InvalidSpec
from drystone.run.train.collectives import Log, Started, Waited, Worked
from drystone.run.train.data import RankWork

sys.path.insert(0, str(Path(__file__).resolve().parents[1] / "oracles"))

from fake_ranks import logs_of_step
from replay import Link, fully_sharded_log, replay

pytestmark = [pytest.mark.torch, pytest.mark.filterwarnings("default")]

SECONDS = {"forward": 1.0, "backward": 3.0, "head": 1.0}
NUM_LAYERS = 3
WIRE_SHARE = 0.05  # gathering a layer, of computing a sample through it on the fastest device


def logs_of(batches) -> list[Log]:
    works = [RankWork(batch=batch, micro_batch=1) for batch in batches]
    spec = a_spec("gpt", tied=False, num_layers=NUM_LAYERS)
    return logs_of_step(spec, works, seq_len=SEQ_LEN, is_small=True)


@pytest.mark.parametrize(("speeds", "batches"), [((1, 3), (4, 12)), ((1, 1, 2, 4), (2, 2, 4, 8))])
def test_uneven_batches_gain_what_they_can(speeds, batches):
    even = [sum(batches) // len(batches)] * len(batches)
    uneven_logs, even_logs = logs_of(batches), logs_of(even)
    layer_bytes = max(one.num_bytes for one in uneven_logs[0] if isinstance(one, Started))
    a_sample = (SECONDS["forward"] + SECONDS["backward"]) / max(speeds)
    link = Link(bandwidth_bytes_per_second=layer_bytes / (WIRE_SHARE * a_sample))
    plain = fully_sharded_log(num_layers=NUM_LAYERS, num_micro_batches=even[0], micro_batch=1,
                              layer_bytes=layer_bytes)  # fmt: skip

    def gain(logs: list[Log], wire: Link) -> float:
        uneven = max(replay(uneven_logs, speeds, SECONDS, wire))
        return max(replay(logs, speeds, SECONDS, wire)) / uneven

    assert gain(even_logs, Link()) == pytest.approx(2.0, rel=1e-12)
    assert gain(even_logs, link) >= 1.95
    # A gather of every layer, twice for each micro-batch, of which the first is never hidden.
    assert gain([plain] * len(speeds), link) >= gain(even_logs, link)


def test_a_collective_ends_after_the_last_to_begin_and_the_one_before():
    def log(*work: Worked):
        return [*work, Started(0, "gather", 100), Started(1, "gather", 100),
                Worked("forward", 1), Waited(0), Waited(1), Worked("forward", 1)]  # fmt: skip

    link = Link(latency_seconds=0.5, bandwidth_bytes_per_second=100)
    slow, fast = log(Worked("forward", 4)), log()

    # The slow one begins at 4; two collectives of 1.5 follow each other to 7; then its last work.
    assert replay([slow, fast], [1, 2], SECONDS, link) == [8.0, 7.5]


def test_logs_that_never_meet_are_refused():
    with pytest.raises(InvalidSpec, match="not every rank has begun"):
        replay([[Started(0, "gather", 1), Waited(0)], []], [1, 1], SECONDS)
    with pytest.raises(InvalidSpec, match="1 logs and 2 speeds"):
        replay([[]], [1, 1], SECONDS)
