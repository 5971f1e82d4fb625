"""What the ranks of two launches do while one hands over to the other."""

import os
from pathlib import Path

from checkpoint_cases import a_trainer, pieces
from engine_cases import Case, tokens

from drystone.run.fence import EPOCH_VARIABLE, FENCE_VARIABLE
from drystone.run.train.checkpoint import handover


def be_epoch(epoch: int, folder: Path) -> None:
    os.environ |= {EPOCH_VARIABLE: str(epoch), FENCE_VARIABLE: str(folder / "fence")}


def train_and_hand_over(case: Case, folder: Path, at: int) -> tuple[list[float], dict, bool]:
    """Losses up to that step, the pieces that were offered, and whether somebody took them."""
    be_epoch(1, folder)
    trainer = a_trainer(case, folder / "checkpoints")
    losses, offered, is_taken = [], {}, False
    for batches in trainer.iterate(tokens().read, num_steps=at):
        losses.append(trainer.step(batches).loss)
    offered = pieces(trainer)
    is_taken = trainer.hand_over()
    return losses, offered, is_taken


def take_over_and_train(case: Case, folder: Path) -> tuple[bool, dict, list[float], int]:
    """Whether anything was taken, the pieces right then, later losses, and the step begun at."""
    be_epoch(2, folder)
    trainer = a_trainer(case, folder / "checkpoints")
    is_taken = trainer.succeed(tell_ready=lambda: None)
    taken, begun = pieces(trainer) if is_taken else {}, trainer.progress.step
    losses = [
        trainer.step(batches).loss
        for batches in trainer.iterate(tokens().read, num_steps=case.steps)
    ]
    return is_taken, taken, losses, begun


def take_half(case: Case, folder: Path) -> str:
    """Die in the middle of taking over, as if somebody had killed this launch."""
    be_epoch(2, folder)
    trainer = a_trainer(case, folder / "checkpoints")
    handover._raise_fence = lambda _: (_ for _ in ()).throw(ConnectionResetError("killed"))
    try:
        trainer.succeed(tell_ready=lambda: None)
    except handover.HandOverFailed as error:
        return str(error)
    return ""
