"""`python -m drystone.run.train plan.json`: one rank of one job.

Started once for each rank, by an engine or by torchrun:

    torchrun --nproc-per-node 2 -m drystone.run.train plan.json --steps 20

Standard output carries one JSON object a line from rank 0; messages go to standard error. SIGTERM
to any rank means: finish the step, write a checkpoint, leave. Exit codes are those of the commands.
"""

from __future__ import annotations

import argparse
import gc
import sys
from pathlib import Path

from drystone.errors import DrystoneError, MissingExtra
from drystone.plan.plan import load_plan

gc.disable()  # a million objects come and stay: looking through them takes a tenth of the start
try:
    from drystone.run.train import lazy_compiler
    from drystone.run.train.group import DEFAULT_TIMEOUT_SECONDS, joined
    from drystone.run.train.loop import TrainSettings, train
except ModuleNotFoundError as missing:
    if missing.name not in ("torch", "transformers"):
        raise
    sys.exit(f"error: {MissingExtra(f'training needs {missing.name}', 'runtime')}")
finally:
    gc.enable()


def main(arguments: list[str] | None = None) -> int:
    """Read the plan, join the others, train."""
    given = _parser().parse_args(arguments)
    settings = TrainSettings(
        num_steps=given.steps,
        learning_rate=given.lr,
        weight_decay=given.weight_decay,
        clip=given.clip,
        data=given.data,
        tokenizer=given.tokenizer,
        checkpoints=given.checkpoints,
        checkpoint_every=given.checkpoint_every,
        keep=given.keep,
        waits_for_saves=given.wait_for_saves,
        rebalances=given.rebalance,
        seed=given.seed,
    )
    try:
        plan = load_plan(given.plan)
        with joined(timeout_seconds=given.timeout) as wire:
            lazy_compiler.install()  # not before: joining looks whether it was imported
            train(plan, settings, wire, sys.stdout)
    except DrystoneError as error:
        sys.stderr.write(f"{error}\n")
        return error.exit_code
    return 0


def _parser() -> argparse.ArgumentParser:
    parser = argparse.ArgumentParser(prog="python -m drystone.run.train")
    parser.add_argument("plan", type=Path, help="what `drystone plan --save` wrote")
    parser.add_argument("--steps", type=int, default=10, help="steps in all, resumed ones included")
    parser.add_argument("--lr", type=float, default=3e-4)
    parser.add_argument("--weight-decay", type=float, default=0.1)
    parser.add_argument("--clip", type=float, default=1.0, help="largest gradient norm; 0: any")
    parser.add_argument("--data", default="synthetic", help="synthetic, .bin, .u16, .u32 or .txt")
    parser.add_argument("--tokenizer", type=Path, help="tokenizer.json of a text; else its bytes")
    parser.add_argument("--checkpoints", type=Path, help="folder to save to and to resume from")
    parser.add_argument("--checkpoint-every", type=int, default=100, help="steps")
    parser.add_argument("--keep", type=int, default=3, help="checkpoints that stay")
    parser.add_argument("--wait-for-saves", action="store_true", help="do not train meanwhile")
    parser.add_argument("--rebalance", action="store_true", help="move samples from stragglers")
    parser.add_argument("--seed", type=int, default=0)
    parser.add_argument("--timeout", type=float, default=DEFAULT_TIMEOUT_SECONDS, help="seconds")
    return parser


if __name__ == "__main__":
    gc.freeze()  # what was imported is never looked through
    sys.exit(main())
