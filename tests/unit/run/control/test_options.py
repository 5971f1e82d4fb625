import json
from types import SimpleNamespace

import numpy as np
import pytest

import drystone
from drystone.describe.files.cluster import parse_cluster
from drystone.describe.files.job import make_job
from drystone.describe.recipe import Precision
from drystone.errors import NothingFits
from drystone.plan.plan import Plan
from drystone.plan.rivals import plan_words
from drystone.run.control.emulation import section_seconds
from drystone.run.control.launches import seat_ranks, take_seats
from drystone.run.control.lesson import Lesson
from drystone.run.control.lessons import pace_lesson, peak_lesson
from drystone.run.control.live_state import LiveState
from drystone.run.control.notes import Learned, parse, render
from drystone.run.control.options import OptionBook, _Basis, job_kind, work_of
from drystone.run.control.progress import RunProgress

CLUSTER = parse_cluster(
    """
nodes:
  - {gpu: A100, count: 2, gpus_per_node: 2, emulate: {speed: 0.001, memory: 4GiB}}
  - {gpu: T4, gpus_per_node: 2, emulate: {speed: 0.001, memory: 4GiB}}
"""
)
A100, T4 = "A100-80GB-SXM", "T4-16GB"


def a_job(folder, model="mini-gpt", **more):
    table = {"model": model, "train": {"steps": 10, "batch": 8, "sequence": 32}}
    return make_job(table | more, folder=folder)


def by_counts(book: OptionBook, job, lesson=None) -> dict[tuple[int, ...], float]:
    if lesson is not None:
        book._lessons[work_of(job)] = lesson
    found = book.options(job)
    return {
        tuple(counts): speed
        for counts, speed in zip(
            found.counts.tolist(), found.samples_per_second.tolist(), strict=True
        )
    }


def test_every_number_of_each_type_is_an_option_unless_fewer_are_as_fast(tmp_path):
    speeds = by_counts(OptionBook(CLUSTER), a_job(tmp_path))
    all_of_them = by_counts(OptionBook(CLUSTER), a_job(tmp_path, gpus={"min": 2}))

    assert {(1, 0), (2, 0), (4, 0), (0, 1), (0, 2)} <= set(speeds)
    assert speeds[1, 0] > speeds[0, 1] > 0
    assert (3, 0) in all_of_them
    assert ((3, 0) in speeds) == (all_of_them[3, 0] > all_of_them[2, 0])


def test_what_is_estimated_is_what_would_be_launched(tmp_path):
    book, job = OptionBook(CLUSTER), a_job(tmp_path)
    for counts, speed in by_counts(book, job).items():
        assert speed == pytest.approx(8 / book.plan(job, counts).step_seconds, rel=0.1)


def test_limits_of_a_job_are_kept(tmp_path):
    book = OptionBook(CLUSTER)

    assert set(by_counts(book, a_job(tmp_path, gpus={"max": 1}))) == {(1, 0), (0, 1)}
    assert set(by_counts(book, a_job(tmp_path, gpus={"deny": ["A100"]}))) == {(0, 1), (0, 2)}
    assert {sum(one) for one in by_counts(book, a_job(tmp_path, gpus={"min": 3}))} <= {3, 4, 5, 6}


def test_a_job_may_have_more_gpus_than_samples_where_layers_or_matrices_are_split(tmp_path):
    large = parse_cluster("nodes: [{gpu: A100-80G, count: 2, gpus_per_node: 8}]")
    train = {"steps": 10, "batch": 8, "sequence": 4096}
    book, job = OptionBook(large), a_job(tmp_path, "llama-3-70b", train=train)

    assert by_counts(book, job)[16,] > 0
    plan = book.plan(job, (16,))
    assert plan.num_gpus == 16
    assert not plan.not_executable


def test_who_must_take_many_may_mix_though_fewer_would_be_faster(tmp_path):
    small = parse_cluster("nodes: [{gpu: A100, gpus_per_node: 2}, {gpu: T4, gpus_per_node: 2}]")
    speeds = by_counts(OptionBook(small), a_job(tmp_path, gpus={"min": 3}))

    assert set(speeds) == {(2, 1), (1, 2), (2, 2)}
    assert min(speeds.values()) > 0


def test_jobs_of_one_kind_share_one_set(tmp_path):
    book = OptionBook(CLUSTER)
    one, two = a_job(tmp_path, name="one"), a_job(tmp_path, name="two", priority=3)

    assert job_kind(one) == job_kind(two)
    assert book.options(one) is book.options(two)
    assert work_of(one) == work_of(a_job(tmp_path, gpus={"max": 1}))
    assert job_kind(one) != job_kind(a_job(tmp_path, gpus={"max": 1}))


def test_what_was_measured_replaces_the_estimate_and_moves_its_type(tmp_path):
    book, job = OptionBook(CLUSTER), a_job(tmp_path)
    before = by_counts(book, job)
    lesson = Lesson(speeds={((A100, 1),): before[1, 0] / 2}, factors={((A100, 1),): 0.5})
    after = by_counts(book, job, lesson)

    assert after[1, 0] == pytest.approx(before[1, 0] / 2)
    assert after[2, 0] == pytest.approx(before[2, 0] / 2)
    assert after[0, 1] == before[0, 1]
    assert list(after) == list(before)  # the rows stay


def test_memory_that_ran_out_rules_out_what_would_need_as_much(tmp_path):
    book, job = OptionBook(CLUSTER), a_job(tmp_path, model="gpt2")
    before = by_counts(book, job)
    plan = book.plan(job, (4, 0))
    assert isinstance(plan, Plan)
    after = by_counts(book, job, Lesson(memory_share=2.0))

    fits_before = {counts for counts, speed in before.items() if speed > 0}
    fits_after = {counts for counts, speed in after.items() if speed > 0}
    assert fits_after < fits_before
    assert list(after)[: len(before)] == list(before)
    by_counts(book, job, Lesson(memory_share=3.9))
    with pytest.raises(NothingFits):
        book.plan(job, (1, 0))


def test_a_job_keeps_its_speed_on_gpus_that_are_listed_no_longer(tmp_path):
    book, job = OptionBook(CLUSTER), a_job(tmp_path, gpus={"max": 1})
    book.options(job)
    book.row_of(job, (2, 2))
    measured = {((A100, 2), (T4, 2)): 7.0}

    assert by_counts(book, job, Lesson(speeds=measured, paces=((T4, 1, 4.0),)))[2, 2] == 7.0
    assert by_counts(book, job, Lesson(speeds=measured, memory_share=2.0))[2, 2] == 0.0


def test_a_script_follows_the_rates_until_it_is_measured(tmp_path):
    book = OptionBook(CLUSTER)
    job = make_job({"command": "x", "train": {"steps": 5}}, folder=tmp_path)
    before = by_counts(book, job)
    assert before[1, 0] > before[0, 1] == 1.0
    assert 1.7 < before[2, 0] / before[1, 0] < 2.0

    after = by_counts(book, job, Lesson(speeds={((T4, 1),): 9.0}, factors={((T4, 1),): 9.0}))
    assert after[0, 1] == 9.0
    assert after[1, 0] == pytest.approx(9 * before[1, 0])  # what one type taught is all we know
    assert book.plan(job, (1, 0)) is None


def test_the_precision_is_the_same_wherever_a_job_runs(tmp_path):
    real = parse_cluster("nodes: [{gpu: A100, gpus_per_node: 8}, {gpu: V100, gpus_per_node: 4}]")
    for cluster, more, expected in (
        (CLUSTER, {}, Precision.FP32),
        (real, {}, Precision.FP16_MIXED),
        (real, {"gpus": {"deny": ["V100"]}}, Precision.BF16_MIXED),
    ):
        book, job = OptionBook(cluster), a_job(tmp_path, **more)
        assert book.recipe(job, book.shape(job)).precision is expected


@pytest.mark.parametrize("gpus", ["V100", "A100", "P40", "A100,T4"])
def test_submit_and_plan_mean_the_same_by_auto(tmp_path, gpus):
    types = gpus.split(",")
    book = OptionBook(
        parse_cluster("nodes: [" + ",".join(f"{{gpu: {gpu}}}" for gpu in types) + "]")
    )
    job = a_job(tmp_path, model="gpt2")

    submitted = book.recipe(job, book.shape(job)).precision
    pool = ",".join(f"1x{gpu}" for gpu in types)
    planned = [p for p in drystone.plan("gpt2", pool).plans if len(p.gpus) == len(types)]

    assert {plan.recipe.precision for plan in planned} == {submitted}


def test_one_old_gpu_in_the_cluster_does_not_slow_the_others_down(tmp_path):
    job = a_job(tmp_path, model="llama-3-8b")
    speeds = []
    for nodes in ("{gpu: A100, gpus_per_node: 8}", "{gpu: A100, gpus_per_node: 8}, {gpu: T4}"):
        book = OptionBook(parse_cluster(f"nodes: [{nodes}]"))
        speeds.append(book.options(job).samples_per_second.max())

    assert speeds[1] == pytest.approx(speeds[0], rel=0.05)


def test_a_row_that_was_not_listed_can_be_added(tmp_path):
    book, job = OptionBook(CLUSTER), a_job(tmp_path, gpus={"max": 1})
    assert len(book.options(job)) == 2
    assert book.row_of(job, (2, 2)) == 2
    assert book.options(job).samples_per_second[2] == 0
    assert np.array_equal(book.options(job).counts[2], [2, 2])


def test_ranks_sit_on_free_devices_of_their_type(tmp_path):
    book, job = OptionBook(CLUSTER), a_job(tmp_path)
    plan = book.plan(job, (2, 1))
    wanted = [("t4-2", T4, 1), ("a100-0", A100, 2)]
    sizes = {"a100-0": 2, "t4-2": 2}
    seats = take_seats(wanted, {"t4-2": {0}}, sizes)
    assert take_seats(wanted, {"a100-0": {1}}, sizes) is None

    ranks = seat_ranks(seats, plan)
    assert [seat.gpu for seat in ranks] == [
        share.gpu for share in plan.stages[0].ranks for _ in range(share.count)
    ]
    assert {(seat.node, seat.device) for seat in ranks} == {
        ("t4-2", 1), ("a100-0", 0), ("a100-0", 1),
    }  # fmt: skip


def test_an_emulated_device_is_as_slow_as_its_estimate(tmp_path):
    book, job = OptionBook(CLUSTER), a_job(tmp_path)
    plan = book.plan(job, (1, 0))
    seconds = section_seconds(plan, CLUSTER.group(A100, 1).machine, A100)
    layers = plan.model.num_layers
    whole = 8 * (layers * (seconds["forward"] + seconds["backward"]) + seconds["head"])

    computing = ("matmul", "attention", "memory_bound", "recompute", "launch_bound")
    assert whole == pytest.approx(sum(plan.time_items[name] for name in computing), rel=0.1)


def test_the_precision_is_decided_once(tmp_path):
    both = parse_cluster("nodes: [{gpu: A100}, {gpu: T4}]")
    alone = parse_cluster("nodes: [{gpu: A100}]")
    job = a_job(tmp_path, model="gpt2")
    early, late = OptionBook(both).settled(job), OptionBook(alone).settled(job)

    assert (early.precision, late.precision) == ("fp16-mixed", "bf16-mixed")
    assert OptionBook(alone).settled(early) == early


def test_paces_of_ranks_move_the_split_and_the_estimates(tmp_path):
    job = a_job(tmp_path)
    plain = OptionBook(CLUSTER)
    lesson = Lesson(paces=((T4, 1, 4.0),))
    paced = OptionBook(CLUSTER, lessons={work_of(job): lesson})

    def batch(book: OptionBook) -> int:
        ranks = book.plan(job, (1, 2)).stages[0].ranks
        return max(share.batch for share in ranks if share.gpu == T4)

    for book in (plain, paced):
        book.options(job)
    assert batch(paced) < batch(plain)
    assert paced.estimated_speed(job, (0, 1)) < 0.5 * plain.estimated_speed(job, (0, 1))
    assert paced.estimated_speed(job, (1, 0)) == plain.estimated_speed(job, (1, 0))


def test_what_ranks_take_over_the_formulas_is_told_once(tmp_path):
    book, job = OptionBook(CLUSTER), a_job(tmp_path)
    book.options(job)
    plan = book.plan(job, (1, 1))
    ranks = plan.stages[0].ranks
    batches = tuple(share.batch for share in ranks)
    layers = plan.model.num_layers

    def seconds(share, factor: float) -> float:
        each = section_seconds(plan, CLUSTER.group(share.gpu, 1).machine, share.gpu)
        sample = layers * (each["forward"] + each["backward"]) + each["head"]
        return share.batch * sample * factor

    factors = {A100: 1.02, T4: 3.0}
    taken = [seconds(share, factors[share.gpu]) for share in ranks]
    progress = RunProgress()
    for step in range(1, 12):
        report = {
            "event": "step", "step": step, "loss": 1.0, "step_seconds": 1.0,
            "batches": batches, "compute_seconds": taken,
        }  # fmt: skip
        progress.read(json.dumps(report), 0.0)
    record = SimpleNamespace(spec=SimpleNamespace(id="1"), option=book.row_of(job, (1, 1)))
    journal = SimpleNamespace(
        unplannable=SimpleNamespace(by_job={}), book=book, cluster=CLUSTER, now=lambda: 5.0,
        live=SimpleNamespace(jobs={"1": SimpleNamespace(job=job)}),
        plan_of=lambda spec, option: plan,
    )  # fmt: skip

    (learned,) = pace_lesson(journal, record, progress)
    assert {gpu: ratio for gpu, _, ratio in learned.paces} == pytest.approx(factors)
    live = LiveState(CLUSTER)
    live.lessons[work_of(job)] = Lesson().after(learned)
    journal.book = OptionBook(CLUSTER, lessons=live.lessons)
    journal.book.options(job)
    assert pace_lesson(journal, record, progress) == []


def test_the_plan_that_a_launch_kept_is_the_plan_from_then_on(tmp_path):
    cluster = parse_cluster("nodes:\n  - {gpu: H100, count: 2}\n")
    book = OptionBook(cluster)
    table = {"model": "llama-3-8b", "train": {"steps": 5000, "batch": 128, "sequence": 2048}}
    job = make_job(table, folder=tmp_path)
    book.options(job)
    counts = (16,)
    best = book.plan(job, counts)
    rivals = book.rivals(job, counts, best)
    assert rivals

    learned = Learned(
        time_seconds=1.0,
        job_id="1",
        work=work_of(job),
        gpus=book.named(counts),
        estimated_samples_per_second=1.0,
        trials=tuple((plan_words(plan), plan.step_seconds, 1.0) for plan in (best, *rivals)),
        kept=plan_words(rivals[0]),
    )
    assert parse(render(learned)) == learned
    book._lessons[work_of(job)] = Lesson().after(learned)

    assert book.plan(job, counts).stages == rivals[0].stages
    assert book.rivals(job, counts, best) == ()  # tried once
    assert book.plan(job, (8,)) == OptionBook(cluster).plan(job, (8,))


def test_a_measured_peak_above_the_estimate_is_a_lesson_once(tmp_path):
    book, job = OptionBook(CLUSTER), a_job(tmp_path)
    book.options(job)
    plan = book.plan(job, (2, 0))
    [need] = plan.needs
    record = SimpleNamespace(spec=SimpleNamespace(id="1"), option=book.row_of(job, (2, 0)))
    journal = SimpleNamespace(
        unplannable=SimpleNamespace(by_job={}), book=book, cluster=CLUSTER, now=lambda: 5.0,
        live=SimpleNamespace(jobs={"1": SimpleNamespace(job=job)}),
        plan_of=lambda spec, option: plan,
    )  # fmt: skip

    def learned(share: float, known: OptionBook = book) -> list:
        journal.book = known
        above = (share - 1.0) * CLUSTER.gpu(A100).usable_bytes
        progress = RunProgress(peak_memory_bytes=int(need.high_bytes + above))
        return peak_lesson(journal, record, progress)

    assert learned(0.9) == learned(1.01) == []
    [lesson] = learned(1.5)
    assert lesson.memory_share * need.high_bytes > 0.5 * CLUSTER.gpu(A100).usable_bytes
    taught = OptionBook(CLUSTER, lessons={work_of(job): Lesson().after(lesson)})
    taught.options(job)
    assert learned(1.5, taught) == []
    usable = taught._pool(job, {A100: 1}, _Basis(memory_share=1.5)).groups[0].gpu.usable_bytes
    assert usable == pytest.approx(CLUSTER.gpu(A100).usable_bytes / 1.5, rel=1e-6)
