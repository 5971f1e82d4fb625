"""What uneven batches gain, by replay of the engine's own log: exact."""

import sys
from pathlib import Path

import pytest

pytest.importorskip("torch")

sys.path.insert(0, str(Path(__file__).parent))
from engine_cases import SEQ_LEN, a_spec

from drystone.errors import InvalidSpec
from drystone.run.runtime.batch import RankWork
from drystone.run.runtime.collectives import Started, Waited, Worked
from drystone.run.runtime.fake import logs_of_step
from drystone.run.runtime.replay import Link, fully_sharded_log, replay

pytestmark = [pytest.mark.torch, pytest.mark.filterwarnings("default")]

SECONDS = {"forward": 1.0, "backward": 3.0, "head": 1.0}
NUM_LAYERS = 3
# A layer's gather is a twentieth of computing a sample of it on the fastest device, and nothing
# hides the first one: compute-bound, with a wire.
LINK = Link(latency_seconds=0.01, bandwidth_bytes_per_second=1e6)


def step_seconds(batches, speeds, link=LINK) -> float:
    works = [RankWork(batch=batch, micro_batch=1) for batch in batches]
    spec = a_spec("gpt", tied=False, num_layers=NUM_LAYERS)
    logs = logs_of_step(spec, works, seq_len=SEQ_LEN, is_small=True)
    return max(replay(logs, speeds, SECONDS, link))


@pytest.mark.parametrize(("speeds", "batches"), [((1, 3), (4, 12)), ((1, 1, 2, 4), (2, 2, 4, 8))])
def test_uneven_batches_gain_what_they_can(speeds, batches):
    even = [sum(batches) // len(batches)] * len(batches)
    alone = Link()

    limit = step_seconds(even, speeds, alone) / step_seconds(batches, speeds, alone)
    gain = step_seconds(even, speeds) / step_seconds(batches, speeds)
    plain = fully_sharded_log(num_layers=NUM_LAYERS, num_micro_batches=even[0], micro_batch=1,
                              layer_bytes=3 * 10**5)  # fmt: skip
    against_fsdp = max(replay([plain] * len(speeds), speeds, SECONDS, LINK)) / step_seconds(
        batches, speeds
    )

    assert limit == pytest.approx(2.0, rel=1e-12)
    assert gain >= 1.95
    assert against_fsdp >= gain


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
