"""kill -9 of a rank at any moment: the others leave, and a restart goes on with the same losses."""

import random
import sys
import time
from pathlib import Path

import pytest

pytest.importorskip("torch")

sys.path.insert(0, str(Path(__file__).parent))
from command_cases import a_plan, events, finish, start

from drystone.plan.plan import save_plan

pytestmark = [pytest.mark.torch, pytest.mark.slow]

NUM_STEPS, TIMEOUT_SECONDS = 40, 20


def losses_of(text: str) -> dict[int, float]:
    whole = [line for line in text.splitlines(keepends=True) if line.endswith("\n")]
    return {one["step"]: one["loss"] for one in events("".join(whole)) if one["event"] == "step"}


def test_a_restart_after_a_kill_continues_the_same_losses(tmp_path: Path):
    save_plan(a_plan([(1, 1, 0.75), (3, 2, 0.25)]), tmp_path / "plan.json")
    command = ["-m", "drystone.run.runtime", str(tmp_path / "plan.json")]
    command += ["--steps", str(NUM_STEPS), "--lr", "0.003", "--timeout", str(TIMEOUT_SECONDS)]
    undisturbed = losses_of(finish(start(command, 2))[0])
    command += ["--checkpoints", str(tmp_path / "saved"), "--checkpoint-every", "3"]
    chance = random.Random(11)
    found: dict[int, float] = {}

    for _ in range(4):
        ranks = start(command, 2)
        lines = [ranks[0].stdout.readline() for _ in range(chance.randint(1, 8))]
        time.sleep(chance.random() * 0.2)
        victim = chance.randrange(2)
        ranks[victim].kill()
        killed = time.monotonic()
        outputs = [process.communicate(timeout=3 * TIMEOUT_SECONDS) for process in ranks]
        waited = time.monotonic() - killed
        found |= losses_of("".join(lines) + outputs[0][0])
        assert waited < TIMEOUT_SECONDS + 10
        assert ranks[1 - victim].returncode != 0 or max(found) == NUM_STEPS
    found |= losses_of(finish(start(command, 2))[0])

    assert found.keys() == undisturbed.keys()
    assert all(found[step] == pytest.approx(undisturbed[step], abs=1e-5) for step in found)
