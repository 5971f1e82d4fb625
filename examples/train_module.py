"""A module of your own as a job: on however many GPUs it is given, it reports, saves and resumes.

    drystone submit examples/job_module.yaml

Put your own model, data and batch in place of the first lines of `main`. What Drystone tells a
script, and what it reads of it, stands in docs/jobs.md; without Drystone (`python
examples/train_module.py`, or torchrun) it trains too, and keeps nothing.
"""

from __future__ import annotations

import os
from collections.abc import Sequence
from pathlib import Path

import torch
from my_module import NUM_LETTERS, build_model

from drystone.run.fence import check_lease
from drystone.run.train.api import NamedBlocks, RankWork, SyntheticTokens, Trainer, joined
from drystone.run.train.step_report import write_event, write_report

GLOBAL_BATCH = 8  # samples in a step, however many ranks share them
SAVE_EVERY = 10  # steps


def even_works(num_ranks: int) -> list[RankWork]:
    """The same for each rank, as far as it divides."""
    share, rest = divmod(GLOBAL_BATCH, num_ranks)
    return [
        RankWork(batch=share + (rank < rest), micro_batch=1, state_share=1 / num_ranks)
        for rank in range(num_ranks)
    ]


def main() -> None:
    """Train until the last step, or until asked to leave."""
    torch.manual_seed(0)  # the same weights on every rank
    model = NamedBlocks(build_model(size=64, num_blocks=6), "blocks")
    tokens = SyntheticTokens(seq_len=32, vocab_size=NUM_LETTERS)

    def read(samples: Sequence[int]) -> tuple[torch.Tensor, torch.Tensor]:
        """The two arguments of the module's forward."""
        found = tokens.read(samples)
        return found[:, :-1], found[:, 1:]

    num_steps = int(os.environ.get("DRYSTONE_STEPS", "20"))
    folder = os.environ.get("DRYSTONE_CHECKPOINTS")
    progress = os.environ.get("DRYSTONE_PROGRESS", "/dev/stdout")
    with joined() as wire, open(progress if wire.rank == 0 else os.devnull, "a") as reports:
        trainer = Trainer(
            model, even_works(wire.num_ranks), wire=wire,
            optimizer=lambda groups: torch.optim.AdamW(groups, lr=1e-3),
            checkpoints=Path(folder) if folder else None,
        )  # fmt: skip
        trainer.leave_on_sigterm()
        trainer.resume()
        if wire.rank == 0:
            write_event(reports, "started", step=trainer.progress.step)
        for batches in trainer.iterate(read, num_steps=num_steps):
            check_lease()  # a process that was given up stops itself
            report = trainer.step(batches)
            if wire.rank == 0:
                write_report(reports, report)
            is_last = trainer.is_leaving or report.step == num_steps
            if is_last or report.step % SAVE_EVERY == 0:
                saved = trainer.save()
                if wire.rank == 0 and saved is not None:
                    write_event(reports, "checkpoint", step=report.step)


if __name__ == "__main__":
    main()
