"""What the ranks of the tests of split jobs do, the plans that they execute, and one device."""

import random
from dataclasses import dataclass, replace
from pathlib import Path

import checkpoint_cases
import engine_cases
import pytest
import torch
from engine_cases import SEQ_LEN, a_spec, tokens
from ranks import run_ranks
from torch import nn

from drystone.describe.layout import Schedule, Sharding
from drystone.describe.model import ModelSpec, QkNorm
from drystone.describe.recipe import Lora, Precision, Recipe, Recompute, RecomputeKind
from drystone.plan.plan import Plan, RankShare, StagePlan, Way
from drystone.run.train.cells.engine import CellEngine, CellTrainer
from drystone.run.train.cells.layout import cell_layout
from drystone.run.train.checkpoint.slices import part_boxes
from drystone.run.train.collectives import Wire
from drystone.run.train.models.lora import add_adapters
from drystone.run.train.models.transformer import Transformer, build_model
from drystone.run.train.trainer import Trainer


@dataclass(frozen=True)
class CellCase:
    """One split of one job. A stage is (layers, tp, micro-batch of each data-parallel rank)."""

    stages: tuple[tuple[int, int, tuple[int, ...]], ...]
    num_micro: int
    batch: int
    style: str = "gpt"
    tied: bool = False
    zero: int = 1
    schedule: Schedule = Schedule.ONE_F_ONE_B
    virtual: int = 1
    splits_sequence: bool = True
    recompute: bool = False
    lora: bool = False
    is_16_bit: bool = False
    clip: float = 0.5
    steps: int = 2
    seq_len: int = SEQ_LEN

    @property
    def num_layers(self) -> int:
        return sum(stage[0] for stage in self.stages)

    @property
    def num_ranks(self) -> int:
        return sum(tp * len(micros) for _, tp, micros in self.stages)

    @property
    def spec(self) -> ModelSpec:
        """Queries and keys of the third style are normalised by head; it has 1 head for keys."""
        if self.style != "qwen":
            return a_spec(self.style, tied=self.tied, num_layers=self.num_layers)
        spec = a_spec("llama", tied=self.tied, num_layers=self.num_layers)
        block = spec.blocks[0]
        attention = replace(block.attention, num_kv_heads=1, qk_norm=QkNorm.HEAD)
        block = replace(block, attention=attention)
        return replace(spec, stack=((block, self.num_layers),))

    def model(self, *, on_meta: bool) -> Transformer:
        model = build_model(self.spec, seed=5, on_meta=on_meta)
        if self.lora:
            add_adapters(model, Lora(rank=3), seed=5)
        return model

    @property
    def plan(self) -> Plan:
        stages, first = [], 0
        for num_layers, tp, micros in self.stages:
            ranks = tuple(
                RankShare(
                    gpu="A100-80G", count=tp, batch=micro * self.num_micro, micro_batch=micro,
                    num_micro_batches=self.num_micro, state_share=1 / (tp * len(micros)),
                )
                for micro in micros
            )  # fmt: skip
            stages.append(
                StagePlan(first_layer=first, end_layer=first + num_layers, ranks=ranks, tp=tp)
            )
            first += num_layers
        kind = RecomputeKind.FULL if self.recompute else RecomputeKind.NONE
        return Plan(
            way=Way.GROUPS,
            model=self.spec,
            recipe=Recipe(
                seq_len=self.seq_len,
                global_batch=self.batch,
                precision=Precision.FP32,
                recompute=Recompute(kind=kind),
            ),
            stages=tuple(stages),
            needs=(),
            step_seconds=1.0,
            time_items={},
            sharding=Sharding(self.zero),
            sequence_parallel=self.splits_sequence,
            schedule=self.schedule,
            virtual_stages=self.virtual,
        )


def cell(dp: int, tp: int, pp: int, **more) -> CellCase:
    """Equal stages of two layers, or one; two micro-batches of two samples for each dp rank."""
    given = {"num_micro": 2, "batch": 4 * dp, **more}
    return CellCase(stages=(((2 if pp < 4 else 1), tp, (2,) * dp),) * pp, **given)


def a_random_case(chance: random.Random, num_ranks: int) -> CellCase:
    """Stages of any degrees, whose data-parallel ranks take any part of a micro-batch."""
    left, stages, size = num_ranks, [], chance.choice((4, 5, 6))
    while left:
        tp = chance.choice([one for one in (1, 1, 2, 4) if one <= left])
        samples = [1] * chance.randint(1, min(left // tp, size))
        for _ in range(size - len(samples) + chance.choice((0, 0, 1))):
            samples[chance.randrange(len(samples))] += 1
        stages.append((chance.randint(1, 2), tp, tuple(samples)))
        left -= tp * len(samples)
    num_micro = chance.randint(1, 4)
    return CellCase(
        stages=tuple(stages),
        num_micro=num_micro,
        batch=num_micro * size - chance.choice((0, 0, num_micro - 1)),
        style=chance.choice(("llama", "qwen")),
        tied=chance.random() < 0.5,
        zero=chance.randrange(4),
        schedule=chance.choice((Schedule.ONE_F_ONE_B, Schedule.GPIPE)),
        splits_sequence=chance.random() < 0.7,
        recompute=chance.random() < 0.3,
        clip=chance.choice((0.0, 0.5)),
    )


def an_optimizer(groups) -> torch.optim.Optimizer:
    """With an epsilon that leaves noise alone: some gradients are 0 but for rounding."""
    return torch.optim.AdamW(groups, lr=3e-3, eps=1e-4)


def train_plainly(case: CellCase) -> list[tuple[float, float, dict[str, torch.Tensor]]]:
    """Loss, gradient norm and gradients (before clipping) of every step, on one device."""
    model = case.model(on_meta=False)
    trained = {name: p for name, p in model.named_parameters() if p.requires_grad}
    matrices = [p for p in trained.values() if p.dim() > 1]
    vectors = [p for p in trained.values() if p.dim() <= 1]
    optimizer = an_optimizer([{"params": matrices, "weight_decay": 0.1},
                              {"params": vectors, "weight_decay": 0.0}])  # fmt: skip
    results = []
    for step in range(case.steps):
        loss = model(tokens().read(range(step * case.batch, (step + 1) * case.batch)))
        loss.backward()
        gradients = {name: p.grad.clone() for name, p in trained.items()}
        norm = nn.utils.clip_grad_norm_(model.parameters(), case.clip or float("inf"))
        results.append((loss.item(), norm.item(), gradients))
        optimizer.step()
        optimizer.zero_grad()
    return results


def an_engine(case: CellCase) -> CellEngine:
    plan = case.plan
    return CellEngine(
        case.model(on_meta=True),
        cell_layout(plan),
        seq_len=case.seq_len,
        wire=Wire(),
        dtype=torch.bfloat16 if case.is_16_bit else torch.float32,
        recompute=plan.recipe.recompute,
    )


def train_split(cases: list[CellCase]) -> list[list[tuple]]:
    """For each case and step: loss, norm, gradients as (name, counted, offsets, values)."""
    return [_train_one(case) for case in cases]


def _train_one(case: CellCase) -> list[tuple]:
    engine = an_engine(case)
    optimizer = an_optimizer(engine.parameter_groups(weight_decay=0.1))
    results = []
    for step in range(case.steps):
        runs = engine.layout.samples(engine.seat, step * case.batch)
        batches = [tokens().read(run) for run in runs] if engine.reads_samples else []
        result = engine.compute_gradients(batches)
        gradients = [
            (one.name, one.is_counted, box.offsets, values)
            for one in engine.owned
            if one.value.requires_grad
            for box, values in boxes_of(one, one.value.grad)
        ]
        if case.clip:
            engine.clip_gradients(result, case.clip)
        optimizer.step()
        optimizer.zero_grad()
        results.append((result.loss, result.gradient_norm, gradients))
    return results


def boxes_of(one, values: torch.Tensor):
    """Values of an owned piece as boxes of the whole parameter."""
    for box in part_boxes(one.shape, one.start, one.end, one.part):
        at = box.start - one.start
        yield box, values[at : at + box.size].view(box.lengths).clone()


def put_together(ranks: list[list[tuple]], like: dict[str, torch.Tensor]):
    """Every element from the one rank that counts; copies must be equal to it."""
    found = {name: torch.full(one.shape, torch.nan) for name, one in like.items()}
    counts = {name: torch.zeros(one.shape) for name, one in like.items()}
    copies = []
    for gradients in ranks:
        for name, is_counted, offsets, values in gradients:
            at = tuple(slice(o, o + n) for o, n in zip(offsets, values.shape, strict=True))
            if is_counted:
                found[name][at] = values
                counts[name][at] += 1
            else:
                copies.append((name, at, values))
    assert all(bool((count == 1).all()) for count in counts.values())
    for name, at, values in copies:
        assert torch.allclose(found[name][at], values, atol=1e-7, rtol=0), name
    return found


def check_equal(cases: list[CellCase], *, backend: str = "gloo") -> None:
    """Every rank reports the true loss and norm; gradients are those of one device."""
    by_rank = run_ranks(train_split, cases[0].num_ranks, cases, backend=backend)
    for index, case in enumerate(cases):
        for step, (loss, norm, gradients) in enumerate(train_plainly(case)):
            most = 2e-2 if case.is_16_bit else 1e-5
            for rank in by_rank:
                assert rank[index][step][0] == pytest.approx(loss, abs=most), (case, step)
                assert rank[index][step][1] == pytest.approx(norm, rel=most), (case, step)
            found = put_together([rank[index][step][2] for rank in by_rank], gradients)
            for name, gradient in gradients.items():
                difference = (found[name] - gradient).abs().max().item()
                assert difference <= most / 10, (case, step, name, difference)


def a_trainer(case: CellCase, folder: Path | None) -> Trainer:
    """With the settings of `checkpoint_cases.a_trainer`, so that each goes on for the other."""
    return CellTrainer(
        case.model(on_meta=True),
        cell_layout(case.plan),
        seq_len=case.seq_len,
        optimizer=engine_cases.an_optimizer,
        clip=0.5,
        weight_decay=0.1,
        checkpoints=folder,
        seed=9,
    )


def train_and_save(case, folder: Path, save_at: int) -> tuple[list[float], list[tuple]]:
    """Losses of the whole run, and what this rank held at the time of saving."""
    trainer = _any_trainer(case, folder)
    losses, saved = [], []
    for batches in trainer.iterate(tokens().read, num_steps=case.steps):
        losses.append(trainer.step(batches).loss)
        if trainer.progress.step == save_at:
            trainer.start_save()
            saved = state_of(trainer)
    trainer.take_saved(wait=True)
    return losses, saved


def _any_trainer(case, folder: Path) -> Trainer:
    make = a_trainer if isinstance(case, CellCase) else checkpoint_cases.a_trainer
    return make(case, folder)


def resume_and_train(case, folder: Path) -> tuple[list[tuple], list[float], int]:
    """What this rank holds right after loading, the losses from there on, the step begun at."""
    trainer = _any_trainer(case, folder)
    assert trainer.resume()
    loaded, begun = state_of(trainer), trainer.progress.step
    losses = [
        trainer.step(batches).loss
        for batches in trainer.iterate(tokens().read, num_steps=case.steps)
    ]
    return loaded, losses, begun


def state_of(trainer: Trainer) -> list[tuple]:
    """Parameters and optimizer state as (name, counted, offsets, values)."""
    found = []
    for one in trainer.engine.owned:
        entries = {"": one.value.detach(), **trainer.optimizer.state[one.value]}
        for key, entry in entries.items():
            name = f"{one.name} {key}".strip()
            if not entry.dim():
                found.append((name, False, (), entry.clone()))
                continue
            for box, values in boxes_of(one, entry):
                found.append((name, one.is_counted, box.offsets, values))
    return found


def whole_state(by_rank: list[list[tuple]]) -> dict[str, torch.Tensor]:
    """All ranks' state put together; copies must be bit-equal."""
    whole: dict[str, torch.Tensor] = {}
    ends: dict[str, list[int]] = {}
    parts = [part for rank in by_rank for part in rank]
    for name, _, offsets, values in parts:
        reached = [o + n for o, n in zip(offsets, values.shape, strict=True)]
        ends[name] = [max(pair) for pair in zip(ends.get(name, reached), reached, strict=True)]
    for is_counting in (True, False):
        for name, is_counted, offsets, values in parts:
            at = tuple(slice(o, o + n) for o, n in zip(offsets, values.shape, strict=True))
            if is_counted and is_counting:
                whole.setdefault(name, torch.full(ends[name], torch.nan))[at] = values
            elif not is_counted and not is_counting:
                assert torch.equal(whole.setdefault(name, values)[at], values), name
    assert not any(bool(one.isnan().any()) for one in whole.values())
    return whole
