"""A loop with Accelerate under Drystone: `join`, `tell`, and a folder to save in.

drystone submit examples/scripts/accelerate_loop.yaml
"""

from __future__ import annotations

import torch
from accelerate import Accelerator, skip_first_batches
from tiny import Letters, build_model

from drystone import contract

GLOBAL_BATCH = 8
SAVE_EVERY = 50


def main() -> None:
    """Train from the newest checkpoint until the last step, or until asked to leave."""
    job = contract.join(num_steps=20)
    accelerator = Accelerator(cpu=not torch.accelerator.is_available())
    model = build_model()
    optimizer = torch.optim.AdamW(model.parameters(), lr=3e-3)
    loader = torch.utils.data.DataLoader(Letters(), GLOBAL_BATCH // accelerator.num_processes)
    model, optimizer, loader = accelerator.prepare(model, optimizer, loader)
    step = 0
    if newest := job.newest():
        accelerator.load_state(str(newest.path))
        step = newest.step
    while step < job.num_steps:
        for batch in skip_first_batches(loader, step % len(loader)):
            loss = model(**batch).loss
            accelerator.backward(loss)
            optimizer.step()
            optimizer.zero_grad()
            step += 1
            is_leaving = job.tell(step, loss=loss.item())
            is_last = is_leaving or step == job.num_steps
            if is_last or step % SAVE_EVERY == 0:
                with job.saving(step) as folder:
                    accelerator.save_state(str(folder))
            if is_last:
                return accelerator.end_training()


if __name__ == "__main__":
    main()
