"""Goodput: throughput of measured steps, statistical efficiency, and the best batch of the two."""

import sys
from pathlib import Path

import numpy as np
import pytest

from drystone.errors import InvalidSpec

sys.path.insert(0, str(Path(__file__).resolve().parents[3] / "benchmarks"))

from goodput.model import (
    GoodputModel,
    StepTimes,
    best_goodput,
    build_noise,
    build_steps,
    fixed_goodput,
    gradient_noise,
)
from goodput.tables import NoiseRow, PlacedStep


def step(placement, local_batch, seconds, sync=0.0, num_nodes=0, num_gpus=0) -> PlacedStep:
    return PlacedStep(
        model="m",
        gpu="A",
        placement=placement,
        num_nodes=num_nodes or len(placement),
        num_gpus=num_gpus or sum(placement),
        local_batch=local_batch,
        step_seconds=seconds,
        sync_seconds=sync,
    )


def noise_rows(noise_scale: float, batches=(10, 20, 40), num_epochs=2) -> list[NoiseRow]:
    """Variance over squared norm is the noise scale over the least batch, in every epoch."""
    return [
        NoiseRow(
            model="m",
            batch=batch,
            epoch=epoch,
            progress_steps=100.0 * epoch + batch,
            squared_norm=2.0,
            variance=2.0 * noise_scale / batches[0],
        )
        for batch in batches
        for epoch in range(1, num_epochs + 1)
    ]


def test_a_step_between_two_measured_batches_lies_on_the_line():
    times = StepTimes([step((1,), 10, 1.0, 0.1), step((1,), 20, 3.0, 0.3)])

    seconds, sync = times.curve((1,)).at(np.array([15.0]))

    assert seconds == pytest.approx(2.0)
    assert sync == pytest.approx(0.2)


def test_placements_count_however_they_lie():
    times = StepTimes([step((1, 4), 10, 1.0), step((1, 4), 20, 2.0)])

    assert times.curve((4, 1)) is times.curve((1, 4))


def test_a_placement_that_was_not_measured_lies_between_as_full_nodes():
    """3 full nodes of 4 lie half-way between 2 and 4 full ones, whatever else was measured."""
    rows = [
        step((4, 4), 10, 1.0),
        step((1, 1), 10, 50.0),
        step((), 10, 3.0, num_nodes=4, num_gpus=16),
        step((), 10, 90.0, num_nodes=4, num_gpus=8),
    ]

    curve = StepTimes(rows).curve((4, 4, 4))

    assert curve.at(np.array([10.0]))[0] == pytest.approx(2.0)


def test_beyond_what_was_measured_nothing_is_said():
    times = StepTimes([step((4,), 10, 1.0), step((4, 4), 10, 1.0)])

    assert times.curve((4, 4, 4)) is None
    assert times.curve((2,)) is None


def test_efficiency_is_as_pollux_has_it():
    """(noise + least) / (noise + batch): section 3.1 of the paper."""
    noise = gradient_noise(noise_rows(noise_scale=30.0))
    batch = np.array([10.0, 20.0, 40.0])

    efficiency = noise.gain(batch)[:, 0] / (batch / 10.0)

    assert efficiency == pytest.approx((30 + 10) / (30 + batch))


def test_an_epoch_ends_with_the_first_batch_size_that_ends_it():
    noise = gradient_noise(noise_rows(30.0))

    assert noise.end_steps.tolist() == [110.0, 210.0]
    assert noise.end_samples.tolist() == [1100.0, 2100.0]


def test_epochs_that_some_batch_size_lacks_are_left_out():
    rows = [row for row in noise_rows(30.0) if (row.batch, row.epoch) != (20, 2)]

    assert len(gradient_noise(rows).end_steps) == 1


def test_noise_needs_two_batch_sizes():
    with pytest.raises(InvalidSpec, match="two batch sizes"):
        gradient_noise(noise_rows(30.0, batches=(10,)))


def test_a_batch_that_does_not_fit_is_split_and_only_the_last_part_exchanges():
    """40 samples on two GPUs that take 10 each: two parts, one exchange of 0.5 s."""
    curve = StepTimes([step((2,), 5, 1.0, 0.5), step((2,), 10, 1.5, 0.5)]).curve((2,))
    noise = gradient_noise(noise_rows(noise_scale=1e12))  # a sample is a sample at any batch

    goodput = fixed_goodput(curve, noise, 2, batch=40, most_local=np.inf)

    assert goodput == pytest.approx(40 / (1.0 + 1.5))


def test_one_gpu_goes_in_two_parts_beyond_the_least_batch():
    """Of a single part the gradient noise could not be told."""
    curve = StepTimes([step((1,), 5, 1.0, 0.2), step((1,), 20, 1.0, 0.2)]).curve((1,))
    noise = gradient_noise(noise_rows(noise_scale=1e12))

    assert fixed_goodput(curve, noise, 1, batch=20, most_local=99) == pytest.approx(20 / 1.8)
    assert fixed_goodput(curve, noise, 1, batch=10, most_local=99) == pytest.approx(10 / 1.0)


@pytest.mark.parametrize("noise_scale", [0.0, 5.0, 50.0, 1e6])
def test_the_best_batch_is_no_worse_than_any(noise_scale: float):
    curve = StepTimes([step((2,), 5, 1.0, 0.3), step((2,), 20, 1.9, 0.3)]).curve((2,))
    noise = gradient_noise(noise_rows(noise_scale))
    best = best_goodput(curve, noise, 2, most_local=np.inf)

    for batch in range(10, 41, 2):
        fixed = fixed_goodput(curve, noise, 2, batch=batch, most_local=np.inf)
        assert (best >= fixed * 0.98).all()  # fifty batches are tried, not all


def test_without_noise_a_larger_batch_gains_nothing():
    curve = StepTimes([step((2,), 5, 1.0), step((2,), 20, 1.9)]).curve((2,))
    noise = gradient_noise(noise_rows(noise_scale=0.0))

    assert best_goodput(curve, noise, 2, most_local=99) == pytest.approx(10 / 1.0)


def test_more_gpus_than_samples_are_no_option():
    curve = StepTimes([step((8,), 10, 1.0), step((8,), 20, 1.0)]).curve((8,))

    assert best_goodput(curve, gradient_noise(noise_rows(1.0)), 8, most_local=99) is None


def test_a_model_knows_where_it_cannot_run_and_how_much_slower_it_is_in_earnest():
    noise = build_noise(noise_rows(1e12))["m"]
    steps = build_steps([step((1,), 10, 1.0), step((1,), 40, 1.0)])["m"]
    model = GoodputModel(steps=steps, noise=noise, slowdown=2.0, most_gpus=1)

    assert model.goodput("A", (1,)) == pytest.approx(40 / 2 / 2.0)  # in two parts of 1 s
    assert (model.goodput("A", (1,), batch=10) == 10 / 2.0).all()
    assert (model.goodput("A", (1, 1)) == 0).all()
    assert (model.goodput("B", (1,)) == 0).all()
    assert model.total_samples == pytest.approx(2100.0)
