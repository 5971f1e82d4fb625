"""Learning rates: as `transformers` has them after the warm-up, and the same after a restart."""

import pytest

pytest.importorskip("torch")

import torch

from drystone.describe.job import TrainConfig
from drystone.run.train.schedule import has_schedule, learning_rate_factor, set_learning_rate

pytestmark = pytest.mark.torch


def factors(num_steps: int, **given: object) -> list[float]:
    config = TrainConfig(**given)
    return [learning_rate_factor(config, step, num_steps) for step in range(num_steps)]


def transformers_factors(name: str, warmup: int, num_steps: int) -> list[float]:
    from transformers import get_scheduler

    optimizer = torch.optim.SGD([torch.zeros(1, requires_grad=True)], lr=1.0)
    schedule = get_scheduler(name, optimizer, warmup, num_steps)
    found = []
    for _ in range(num_steps):
        found.append(schedule.get_last_lr()[0])
        optimizer.step()
        schedule.step()
    return found


@pytest.mark.parametrize(("ours", "theirs"), [("linear", "linear"), ("cosine", "cosine")])
def test_after_the_warm_up_it_falls_as_in_transformers(ours: str, theirs: str):
    pytest.importorskip("transformers")

    expected = transformers_factors(theirs, 10, 100)

    assert factors(100, schedule=ours, warmup="10%")[10:] == pytest.approx(expected[10:])


def test_the_warm_up_rises_to_the_whole_rate_and_no_step_is_lost():
    found = factors(100, warmup="4")

    assert found[:5] == [0.25, 0.5, 0.75, 1.0, 1.0]
    assert found[-1] == 1.0


def test_stable_until_the_decay():
    found = factors(100, schedule="wsd", warmup="10", decay="20%", floor=0.1)

    assert set(found[9:81]) == {1.0}
    assert found[90] == pytest.approx(0.55)
    assert 0.1 < found[99] < 0.2


@pytest.mark.parametrize("schedule", ["constant", "linear", "cosine", "wsd"])
@pytest.mark.parametrize("warmup", ["0", "5", "100%", "1000"])
def test_no_schedule_leaves_the_range(schedule: str, warmup: str):
    found = factors(7, schedule=schedule, warmup=warmup)

    assert all(0 < factor <= 1 for factor in found)


def test_groups_keep_their_own_rates():
    parts = [torch.zeros(1, requires_grad=True) for _ in range(2)]
    optimizer = torch.optim.SGD(
        [{"params": parts[:1], "lr": 1.0}, {"params": parts[1:], "lr": 4.0}]
    )

    for factor in (0.5, 0.25):
        set_learning_rate(optimizer, factor)

    assert [group["lr"] for group in optimizer.param_groups] == [0.25, 1.0]
    assert not has_schedule(TrainConfig(warmup="0%"))
