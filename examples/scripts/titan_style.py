"""A loop as torchtitan writes it, under Drystone: FSDP2, a device mesh, distributed checkpoints.

    drystone submit examples/scripts/titan_style.yaml

A checkpoint of two ranks is loaded by one: `torch.distributed.checkpoint` cuts it anew.
"""

from __future__ import annotations

import torch
import torch.distributed as dist
import torch.distributed.checkpoint as dcp
from tiny import Letters, build_model
from torch.distributed.checkpoint.state_dict import get_state_dict, set_state_dict
from torch.distributed.device_mesh import init_device_mesh
from torch.distributed.fsdp import fully_shard

from drystone import contract

GLOBAL_BATCH = 8
SAVE_EVERY = 50


def main() -> None:
    """Train from the newest checkpoint until the last step, or until asked to leave."""
    job = contract.join(num_steps=20)
    device = "cuda" if torch.cuda.is_available() else "cpu"
    dist.init_process_group("nccl" if device == "cuda" else "gloo")
    mesh = init_device_mesh(device, (job.num_ranks,), mesh_dim_names=("dp",))
    model = build_model().to(device)
    for layer in model.model.layers:
        fully_shard(layer, mesh=mesh)
    fully_shard(model, mesh=mesh)
    optimizer = torch.optim.AdamW(model.parameters(), lr=3e-3)
    step = 0
    if newest := job.newest():
        weights, state = get_state_dict(model, optimizer)
        dcp.load({"model": weights, "optimizer": state}, checkpoint_id=newest.path)
        set_state_dict(model, optimizer, model_state_dict=weights, optim_state_dict=state)
        step = newest.step
    letters, is_leaving = Letters(), False
    while step < job.num_steps and not is_leaving:
        first = step * GLOBAL_BATCH  # samples are numbered over all ranks: a resize loses none
        mine = range(first + job.rank, first + GLOBAL_BATCH, job.num_ranks)
        tokens = torch.stack([letters[sample % len(letters)]["input_ids"] for sample in mine])
        loss = model(input_ids=tokens.to(device), labels=tokens.to(device)).loss
        loss.backward()
        optimizer.step()
        optimizer.zero_grad()
        step += 1
        mean = loss.detach() / job.num_ranks
        dist.all_reduce(mean)
        is_leaving = job.tell(step, loss=mean.item())
        if is_leaving or step == job.num_steps or step % SAVE_EVERY == 0:
            weights, state = get_state_dict(model, optimizer)
            with job.saving(step) as folder:
                dcp.save({"model": weights, "optimizer": state}, checkpoint_id=folder)
    dist.destroy_process_group()


if __name__ == "__main__":
    main()
