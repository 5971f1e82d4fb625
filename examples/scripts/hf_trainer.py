"""The Trainer of `transformers` under Drystone: one callback is all that is added.

drystone submit examples/scripts/hf_trainer.yaml
"""

from __future__ import annotations

from pathlib import Path
from typing import Any

from tiny import Letters, build_model
from transformers import Trainer, TrainerCallback, TrainingArguments

from drystone import contract

GLOBAL_BATCH = 8  # samples in a step, however many ranks share them


class Reports(TrainerCallback):
    """Tells Drystone of steps and checkpoints; saves and stops when it is asked to leave."""

    def __init__(self, job: contract.Contract) -> None:
        self.job = job

    def on_step_end(self, args: Any, state: Any, control: Any, **_: Any) -> None:
        """After a step, on all ranks."""
        losses = [entry["loss"] for entry in state.log_history[-2:] if "loss" in entry]
        if self.job.tell(state.global_step, loss=losses[-1] if losses else None):
            control.should_save = control.should_training_stop = True

    def on_save(self, args: Any, state: Any, control: Any, **_: Any) -> None:
        """Once a checkpoint is written."""
        step = state.global_step
        self.job.mark(Path(args.output_dir) / f"checkpoint-{step}", step)


def main() -> None:
    """Train from the newest checkpoint until the last step, or until asked to leave."""
    job = contract.join(num_steps=20)
    arguments = TrainingArguments(
        output_dir=str(job.folder), max_steps=job.num_steps, save_steps=50, save_total_limit=2,
        per_device_train_batch_size=max(1, GLOBAL_BATCH // job.num_ranks), learning_rate=3e-3,
        lr_scheduler_type="constant", logging_steps=1, report_to=[], disable_tqdm=True,
        use_cpu=True,  # leave this out where there are GPUs
    )  # fmt: skip
    trainer = Trainer(build_model(), arguments, train_dataset=Letters(), callbacks=[Reports(job)])
    newest = job.newest()
    trainer.train(resume_from_checkpoint=str(newest.path) if newest else None)


if __name__ == "__main__":
    main()
