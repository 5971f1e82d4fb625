"""Run by `test_run_by_trainer.py`, as `accelerate launch` does: two steps of a tiny model.

Prints what the Trainer made of the exported config, as one JSON object.
"""

import json
import sys

import torch
import yaml
from transformers import (
    GPT2Config,
    GPT2LMHeadModel,
    HfArgumentParser,
    Trainer,
    TrainingArguments,
)


def main(config: str, folder: str) -> None:
    with open(config) as file:
        table = yaml.safe_load(file)
    del table["model_name_or_path"]
    ours = {"output_dir": folder, "use_cpu": True, "max_steps": 2, "report_to": "none"}
    quiet = {"save_strategy": "no", "disable_tqdm": True, "logging_strategy": "no"}
    [arguments] = HfArgumentParser(TrainingArguments).parse_dict(table | ours | quiet)
    torch.manual_seed(0)
    shape = {"n_layer": 2, "n_embd": 32, "n_head": 2, "vocab_size": 64, "n_positions": 16}
    model = GPT2LMHeadModel(GPT2Config(**shape, bos_token_id=None, eos_token_id=None))
    row = torch.arange(16)
    sizes = []

    class Counting(Trainer):
        def training_step(self, model, inputs, *more, **named):
            sizes.append(len(inputs["input_ids"]))
            return super().training_step(model, inputs, *more, **named)

    trainer = Counting(
        model=model, args=arguments, train_dataset=[{"input_ids": row, "labels": row}] * 64
    )
    result = trainer.train()
    if trainer.accelerator.is_main_process:
        told = {
            "ranks": trainer.accelerator.num_processes,
            "precision": trainer.accelerator.state.mixed_precision,
            "micro_batches": sizes,
            "recomputes": model.is_gradient_checkpointing,
            "steps": result.global_step,
            "optimizer": type(trainer.optimizer.optimizer).__name__,
            "loss": result.training_loss,
        }
        sys.stdout.write("answer: " + json.dumps(told) + "\n")


if __name__ == "__main__":
    main(*sys.argv[1:])
