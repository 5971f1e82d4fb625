"""kill -9 of a rank at any moment: the others leave, and a restart goes on with the same losses."""

import random
import sys
import time
from multiprocessing.process import BaseProcess
from pathlib import Path

import pytest

pytest.importorskip("torch")

sys.path.insert(0, str(Path(__file__).parent))
from command_cases import a_plan, events, fork, join

from drystone.plan.plan import save_plan

pytestmark = [pytest.mark.torch, pytest.mark.slow]

NUM_KILLS, NUM_RANKS, TIMEOUT_SECONDS = 50, 4, 5
# A rank that waits in vain gives up after the timeout, or a second later (`ends_within`);
# the rest is for ranks of a busy machine that begin to wait only after the kill.
MOST_SECONDS = TIMEOUT_SECONDS + 1 + 4
SPLITS = (
    [(1, 1, 0.5), (3, 2, 0.25), (0, 0, 0.25), (2, 1, 0.0)],
    [(2, 2, 0.1), (2, 1, 0.2), (1, 1, 0.3), (1, 1, 0.4)],
)


def losses_of(output: Path) -> dict[int, float]:
    text = output.read_text() if output.exists() else ""
    whole = [line for line in text.splitlines(keepends=True) if line.endswith("\n")]
    return {one["step"]: one["loss"] for one in events("".join(whole)) if one["event"] == "step"}


def wait_for_lines(output: Path, number: int, *, seconds: float = 60) -> None:
    until = time.monotonic() + seconds
    while time.monotonic() < until:
        if output.exists() and output.read_text().count("\n") >= number:
            return
        time.sleep(0.01)
    raise AssertionError(f"no {number} lines: {Path(f'{output}.err').read_text()}")


def join_all(ranks: list[BaseProcess], *, seconds: float) -> list[int]:
    """Exit codes; all must have ended within these seconds of now, not of each other."""
    until = time.monotonic() + seconds
    return [code for one in ranks for code in join([one], seconds=max(until - time.monotonic(), 0))]


def test_fifty_kills_at_any_moment_leave_the_losses_as_they_were(tmp_path: Path):
    plans = []
    for index, split in enumerate(SPLITS):
        plans.append(str(tmp_path / f"plan{index}.json"))
        save_plan(a_plan(split), tmp_path / f"plan{index}.json")
    settings = ["--lr", "0.003", "--timeout", str(TIMEOUT_SECONDS)]
    saved = ["--checkpoints", str(tmp_path / "saved"), "--checkpoint-every", "1"]
    output = tmp_path / "0.out"
    chance = random.Random(11)
    found: dict[int, float] = {}
    reached = []
    progress = tmp_path / "kills"

    for kill in range(NUM_KILLS):
        output.unlink(missing_ok=True)
        command = [plans[kill % 2], "--steps", "100000", *settings, *saved]
        ranks = fork(command, NUM_RANKS, tmp_path)
        if chance.random() < 0.8:  # else while they join each other and load
            wait_for_lines(output, chance.randint(1, 8))
        time.sleep(chance.random() * 0.1)
        ranks[chance.randrange(NUM_RANKS)].kill()
        codes = join_all(ranks, seconds=MOST_SECONDS)
        assert 0 not in codes
        for step, loss in losses_of(output).items():
            assert found.setdefault(step, loss) == pytest.approx(loss, abs=1e-5), (kill, step)
        reached.append(max(found, default=0))
        progress.write_text(f"{kill + 1} kills, step {reached[-1]}\n")

    command = [plans[0], "--steps", str(max(found)), *settings]
    assert join(fork(command, NUM_RANKS, tmp_path)) == [0] * NUM_RANKS
    undisturbed = losses_of(output)
    assert found.keys() == undisturbed.keys()
    assert all(found[step] == pytest.approx(undisturbed[step], abs=1e-5) for step in found)
    assert len(set(reached)) > NUM_KILLS // 4, "hardly any run came further than the one before"
