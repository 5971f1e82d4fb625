"""`python -m drystone.run.train plan.json`: one rank of one job.

Started once for each rank, by an engine or by torchrun:

    torchrun --nproc-per-node 2 -m drystone.run.train plan.json --steps 20

Standard output carries one JSON object a line from rank 0; messages go to standard error. SIGTERM
to any rank means: finish the step, write a checkpoint, leave. Exit codes are those of the commands.
"""

from __future__ import annotations

import argparse
import gc
import os
import sys
from pathlib import Path

from drystone.errors import DrystoneError, MissingExtra
from drystone.plan.plan import load_plan

gc.disable()  # a million objects come and stay: looking through them takes a tenth of the start
try:
    # The first optimizer imports it in any case; here, no garbage is looked for meanwhile.
    import torch._dynamo  # noqa: F401

    from drystone.run.train.config import add_flags, read_flags
    from drystone.run.train.emulate import VARIABLE
    from drystone.run.train.group import joined
    from drystone.run.train.loop import end, train
    from drystone.run.train.trials import keep_fastest
except ModuleNotFoundError as missing:
    if missing.name not in ("torch", "transformers"):
        raise
    sys.exit(f"error: {MissingExtra(f'training needs {missing.name}', 'runtime')}")
finally:
    gc.enable()


def main(arguments: list[str] | None = None) -> int:
    """Read the plan, join the others, train."""
    given = _parser().parse_args(arguments)
    try:
        config = read_flags(given)
        plan = load_plan(given.plan)
        with joined(timeout_seconds=config.timeout_seconds) as wire:
            if config.rivals is not None:
                plan, emulation = keep_fastest(plan, config.rivals, config, wire, sys.stdout)
                os.environ[VARIABLE] = emulation  # devices pretend what they do under this plan
            ending = train(plan, config, wire, sys.stdout)
            is_first = wire.rank == 0
        if is_first:
            end(ending, plan, config, sys.stdout)
    except DrystoneError as error:
        sys.stderr.write(f"{error}\n")
        return error.exit_code
    return 0


def _parser() -> argparse.ArgumentParser:
    parser = argparse.ArgumentParser(prog="python -m drystone.run.train")
    parser.add_argument("plan", type=Path, help="what `drystone plan --save` wrote")
    add_flags(parser)
    return parser


if __name__ == "__main__":
    gc.freeze()  # what was imported is never looked through
    sys.exit(main())
