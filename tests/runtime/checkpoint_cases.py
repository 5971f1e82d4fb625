"""What the ranks of the checkpoint tests do."""

import threading
from pathlib import Path

import torch
import torch.distributed as dist
from engine_cases import Case, a_model, an_optimizer, tokens

from drystone.errors import DrystoneError
from drystone.run.train.checkpoint import hashes
from drystone.run.train.trainer import Trainer


def a_trainer(case: Case, folder: Path | None, *, keep: int = 3) -> Trainer:
    return Trainer(
        a_model(case),
        case.works,
        optimizer=an_optimizer,
        clip=0.5,
        weight_decay=0.1,
        checkpoints=folder,
        keep=keep,
        seed=9,
    )


def pieces(trainer: Trainer) -> dict[str, list[tuple[int, torch.Tensor]]]:
    """Every owned piece of parameters and optimizer state: name to (start, values)."""
    found = {}
    for one in trainer.engine.owned:
        found.setdefault(one.name, []).append((one.start, one.value.detach().clone()))
        for key, entry in trainer.optimizer.state[one.value].items():
            start = one.start if entry.dim() else 0
            found.setdefault(f"{one.name} {key}", []).append((start, entry.clone().reshape(-1)))
    return found


def train_and_save(case: Case, folder: Path, save_at: int) -> tuple[list[float], dict]:
    """Losses of the whole run, and the pieces at the time of saving."""
    trainer = a_trainer(case, folder)
    losses, saved = [], {}
    for batches in trainer.iterate(tokens().read, num_steps=case.steps):
        losses.append(trainer.step(batches).loss)
        if trainer.progress.step == save_at:
            trainer.save()
            saved = pieces(trainer)
    return losses, saved


def resume_and_train(case: Case, folder: Path) -> tuple[dict, list[float], int]:
    """The pieces right after loading, the losses from there on, and the step begun at."""
    trainer = a_trainer(case, folder)
    assert trainer.resume()
    loaded, begun = pieces(trainer), trainer.progress.step
    losses = [
        trainer.step(batches).loss
        for batches in trainer.iterate(tokens().read, num_steps=case.steps)
    ]
    return loaded, losses, begun


def refused_resume(case: Case, folder: Path) -> str:
    """The error that this rank is told."""
    try:
        a_trainer(case, folder).resume()
    except DrystoneError as error:
        return type(error).__name__
    return ""


def rebalance_at_every_step(case: Case, many_batches: list[tuple[int, ...]]) -> list[float]:
    """Losses while the batches change from step to step."""
    trainer = a_trainer(case, None)
    losses = []
    for batches in trainer.iterate(tokens().read, num_steps=len(many_batches)):
        losses.append(trainer.step(batches).loss)
        trainer.rebalance(many_batches[trainer.progress.step % len(many_batches)])
    return losses


def joined_pieces(by_rank: list[dict]) -> dict[str, torch.Tensor]:
    """All ranks' pieces put together."""
    whole: dict[str, list] = {}
    for found in by_rank:
        for name, some in found.items():
            whole.setdefault(name, []).extend(some)
    result = {}
    for name, some in whole.items():
        if name.endswith(" step"):
            result[name] = torch.stack([values for _, values in some]).unique()
        else:
            result[name] = torch.cat([values for _, values in sorted(some, key=lambda one: one[0])])
    return result


def resume_and_say_what_was_read(case: Case, folder: Path) -> tuple[int, list[str], int]:
    """Where training goes on, which files this rank read, and how often all met meanwhile.

    The first rank's reading ends only when the ranks have met three times.
    """
    read, meetings = [], []
    real_hash, real_reduce = hashes._hash, dist.all_reduce
    has_met = threading.Event()

    def reduce(values: torch.Tensor, **given) -> None:
        meetings.append(1)
        if len(meetings) >= 3:
            has_met.set()
        real_reduce(values, **given)

    def read_file(path: Path, *, sync: bool = False) -> str:
        read.append(path.name)
        if dist.get_rank() == 0:
            assert has_met.wait(60)
        return real_hash(path, sync=sync)

    trainer = a_trainer(case, folder)
    hashes._hash, dist.all_reduce = read_file, reduce
    try:
        trainer.resume()
    finally:
        hashes._hash, dist.all_reduce = real_hash, real_reduce
    return trainer.progress.step, read, len(meetings)
