"""Blocks of epochs: when a change of resources pays for its restart."""

from dataclasses import replace

import numpy as np
import pytest

from drystone.errors import InvalidSpec
from drystone.schedule.budget.blocks import BlockClasses, best_paths, path_costs, trace_paths
from drystone.schedule.budget.frontier import classes_from_speeds, trace_frontier

GPUS = np.array([1.0, 2, 4, 8, 12, 16])
# cifar10 epochs 0, 20 and 70 on T4 GPUs: measured goodput in samples/s (boa.md 2.4).
CIFAR = np.array(
    [
        [999.0, 943, 1622, 1399, 2593, 2309],
        [988, 1604, 2634, 2219, 3536, 4152],
        [1000, 2044, 3805, 3269, 3453, 4615],
    ]
)
EPOCH_SAMPLES = 50_000.0


def cifar(rescaling_seconds: float = 0.0, epochs_a_block: float = 10.0) -> BlockClasses:
    """One class of three blocks; a GPU costs one dollar an hour."""
    return BlockClasses(
        arrivals_per_second=np.array([0.002467]),
        weights=np.ones(1),
        block_samples=np.full((1, 3), epochs_a_block * EPOCH_SAMPLES),
        samples_per_second=CIFAR[None],
        price_dollars_per_hour=GPUS[None],
        rescaling_seconds=np.full((1, len(GPUS)), rescaling_seconds),
    )


def test_without_a_rescaling_cost_every_block_is_a_class_of_its_own():
    # boa.md 2.4: class = (application, epoch).
    blocks = cifar()
    apart = trace_frontier(
        classes_from_speeds(
            arrivals_per_second=np.full(3, 0.002467),
            mean_samples=10 * EPOCH_SAMPLES,
            price_dollars_per_hour=GPUS,
            samples_per_second=CIFAR,
        )
    )
    joined = trace_frontier(trace_paths(blocks).classes)

    assert joined.spend_dollars_per_hour == pytest.approx(apart.spend_dollars_per_hour)
    # Three blocks make one job.
    assert joined.mean_completion_seconds == pytest.approx(3 * apart.mean_completion_seconds)


def test_a_dear_restart_keeps_one_width_throughout():
    one, hour = np.ones(1), np.array([3600.0])
    rows = np.arange(1)
    changing = best_paths(cifar(), rows, one, 0.3 * hour)[0]
    steady = best_paths(cifar(rescaling_seconds=1e5), rows, one, 0.3 * hour)[0]

    assert len(set(changing.tolist())) > 1
    assert len(set(steady.tolist())) == 1


def test_the_start_is_paid_once_and_every_change_again():
    blocks = cifar(rescaling_seconds=120.0)
    rows = np.zeros(2, dtype=np.int64)
    seconds, dollars = path_costs(blocks, rows, np.array([[2, 2, 2], [0, 2, 2]]))

    work = 10 * EPOCH_SAMPLES / CIFAR
    assert seconds[0] == pytest.approx(work[:, 2].sum() + 120)
    assert dollars[0] == pytest.approx(4 * seconds[0] / 3600)
    assert seconds[1] == pytest.approx(work[0, 0] + work[1, 2] + work[2, 2] + 240)
    assert dollars[1] == pytest.approx((seconds[1] * 4 - (work[0, 0] + 120) * 3) / 3600)


def test_a_rescaling_cost_never_helps():
    budgets = [30.0, 60.0, 120.0]
    before = np.zeros(len(budgets))
    for rescaling_seconds in (0.0, 50.0, 120.0, 600.0):
        frontier = trace_frontier(trace_paths(cifar(rescaling_seconds)).classes)
        times = [frontier.at_budget(budget).mean_completion_seconds for budget in budgets]
        assert (np.array(times) >= before).all()
        before = np.array(times)


def test_only_the_paths_of_the_hull_are_found():
    found = trace_paths(cifar(rescaling_seconds=120.0))
    frontier = trace_frontier(found.classes)

    num_paths = int(np.isfinite(found.classes.job_seconds[0]).sum())
    assert num_paths <= frontier.hulls.shape[1] + 2
    assert found.paths.shape == (1, num_paths, 3)


def test_classes_with_fewer_blocks_end_with_blocks_of_no_work():
    blocks = cifar(rescaling_seconds=60.0)
    shorter = replace(blocks, block_samples=np.array([[5e5, 0.0, 0.0]]))
    alone = replace(blocks, block_samples=np.array([[5e5]]), samples_per_second=CIFAR[None, :1])

    one, two = (trace_frontier(trace_paths(each).classes) for each in (shorter, alone))
    assert one.spend_dollars_per_hour == pytest.approx(two.spend_dollars_per_hour)
    assert one.mean_completion_seconds == pytest.approx(two.mean_completion_seconds)


@pytest.mark.parametrize(
    ("change", "message"),
    [
        ({"block_samples": np.zeros((1, 3))}, "a block with work"),
        ({"block_samples": np.ones((1, 2))}, "must be"),
        ({"samples_per_second": np.zeros((1, 3, 6))}, "no choice for it"),
        ({"samples_per_second": np.ones((3, 6))}, "blocks, choices"),
        ({"rescaling_seconds": np.full((1, 6), -1.0)}, "0 or more"),
        ({"price_dollars_per_hour": np.full((1, 6), np.nan)}, "finite"),
    ],
)
def test_nonsense_is_refused(change, message):
    with pytest.raises(InvalidSpec, match=message):
        replace(cifar(), **change)
