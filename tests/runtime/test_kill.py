"""kill -9 of a rank at any moment: the others leave, and a restart goes on with the same losses.

The suite kills a few times; DRYSTONE_NUM_KILLS=50 asks for more. The file `kills` in the folder of
the test says how many hit which phase.
"""

import os
import random
import sys
import time
from collections import Counter
from multiprocessing.process import BaseProcess
from pathlib import Path

import pytest

pytest.importorskip("torch")

sys.path.insert(0, str(Path(__file__).parent))
from command_cases import a_plan, events, fork, join

from drystone.plan.plan import save_plan

pytestmark = [pytest.mark.torch, pytest.mark.slow]

NUM_KILLS = int(os.environ.get("DRYSTONE_NUM_KILLS", "6"))
NUM_RANKS, TIMEOUT_SECONDS = 4, 5
# A rank that waits in vain gives up after the timeout, or a second later (`ends_within`);
# the rest is for ranks of a busy machine that begin to wait only after the kill.
MOST_SECONDS = TIMEOUT_SECONDS + 1 + 4
SPLITS = (
    [(1, 1, 0.5), (3, 2, 0.25), (0, 0, 0.25), (2, 1, 0.0)],
    [(2, 2, 0.1), (2, 1, 0.2), (1, 1, 0.3), (1, 1, 0.4)],
)
PHASES = ("step", "save", "join")


def losses_of(output: Path) -> dict[int, float]:
    text = output.read_text() if output.exists() else ""
    whole = [line for line in text.splitlines(keepends=True) if line.endswith("\n")]
    return {one["step"]: one["loss"] for one in events("".join(whole)) if one["event"] == "step"}


def num_lines(output: Path) -> int:
    return output.read_text().count("\n") if output.exists() else 0


def half_written(saved: Path) -> set[Path]:
    """Checkpoints that have not got their name yet."""
    return set(saved.glob(".step-*.part"))


class Killer:
    """Waits for the moment that is asked for, and says which one it was."""

    def __init__(self, output: Path, saved: Path, chance: random.Random) -> None:
        self._output, self._saved, self._chance = output, saved, chance
        self._join_seconds = 0.5  # from the start to the first line, as seen last
        self._num_joining = 0

    def wait_for(self, wanted: str, ranks: list[BaseProcess], *, seconds: float = 60) -> None:
        started, until = time.monotonic(), time.monotonic() + seconds
        left_behind = half_written(self._saved)  # by the kill before
        if wanted == "join":  # at moments that are spread over all of it
            share = (self._num_joining * 0.618 + self._chance.random() * 0.2) % 1
            self._num_joining += 1
            time.sleep(share * self._join_seconds)
            return
        while not num_lines(self._output):
            self._pause(until, ranks)
        self._join_seconds = time.monotonic() - started
        number = self._chance.randint(1, 8)
        while num_lines(self._output) < number:
            self._pause(until, ranks)
        if wanted == "step":
            time.sleep(self._chance.random() * 0.1)
            return
        while not half_written(self._saved) - left_behind:
            self._pause(until, ranks)
        time.sleep(self._chance.random() * 0.02)

    def _pause(self, until: float, ranks: list[BaseProcess]) -> None:
        if time.monotonic() > until or any(one.exitcode is not None for one in ranks):
            raise AssertionError(f"no kill: {Path(f'{self._output}.err').read_text()}")
        time.sleep(0.001)

    def kill(self, rank: BaseProcess, left_behind: set[Path]) -> str:
        """The phase that it hit, by what is to be seen right before."""
        is_saving = bool(half_written(self._saved) - left_behind)
        has_begun = num_lines(self._output) > 0
        rank.kill()
        return "join" if not has_begun else "save" if is_saving else "step"


def join_all(ranks: list[BaseProcess], *, seconds: float) -> list[int]:
    """Exit codes; all must have ended within these seconds of now, not of each other."""
    until = time.monotonic() + seconds
    return [code for one in ranks for code in join([one], seconds=max(until - time.monotonic(), 0))]


def test_kills_at_any_moment_leave_the_losses_as_they_were(tmp_path: Path):
    plans = []
    for index, split in enumerate(SPLITS):
        plans.append(str(tmp_path / f"plan{index}.json"))
        save_plan(a_plan(split), tmp_path / f"plan{index}.json")
    saved, output = tmp_path / "saved", tmp_path / "0.out"
    settings = ["--lr", "0.003", "--timeout", str(TIMEOUT_SECONDS)]
    saving = ["--checkpoints", str(saved), "--checkpoint-every", "2"]
    chance = random.Random(11)
    killer = Killer(output, saved, chance)
    found: dict[int, float] = {}
    reached, hit = [], Counter[str]()

    for kill in range(NUM_KILLS):
        output.unlink(missing_ok=True)
        left_behind = half_written(saved)
        ranks = fork(
            [plans[kill % 2], "--steps", "100000", *settings, *saving], NUM_RANKS, tmp_path
        )
        killer.wait_for(PHASES[kill % len(PHASES)], ranks)
        hit[killer.kill(ranks[chance.randrange(NUM_RANKS)], left_behind)] += 1
        codes = join_all(ranks, seconds=MOST_SECONDS)
        assert 0 not in codes
        for step, loss in losses_of(output).items():
            assert found.setdefault(step, loss) == pytest.approx(loss, abs=1e-5), (kill, step)
        reached.append(max(found, default=0))
        (tmp_path / "kills").write_text(f"{kill + 1} kills {dict(hit)}, step {reached[-1]}\n")

    command = [plans[0], "--steps", str(max(found)), *settings]
    assert join(fork(command, NUM_RANKS, tmp_path)) == [0] * NUM_RANKS
    undisturbed = losses_of(output)
    assert found.keys() == undisturbed.keys()
    assert all(found[step] == pytest.approx(undisturbed[step], abs=1e-5) for step in found)
    assert set(hit) == set(PHASES), "some phase was never hit"
    assert len(set(reached)) > NUM_KILLS // 4, "hardly any run came further than the one before"
