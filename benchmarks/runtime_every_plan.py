"""Does every plan in the planner's space run to the end under NCCL's rules?

    python benchmarks/runtime_every_plan.py [--gpus 2,4,8] [--most 60] [--seed 0]

Three small models (a Llama, one whose heads share keys and values, a GPT-2), each with a head of
its own and with a tied one. For every number of GPUs all layouts are listed that the planner has
and the runtime executes: data, tensor and pipeline degrees, schedules, virtual stages, ZeRO,
micro-batches, recomputation; and data parallelism with equal and with uneven shares. Up to `--most`
of them a model, chosen by the seed, train two steps each under the rules of
`tests/runtime/nccl_rules.py`; their losses must be those of one another.
"""

from __future__ import annotations

import argparse
import math
import random
import sys
import tempfile
import time
from pathlib import Path

sys.path.insert(0, str(Path(__file__).resolve().parents[1] / "tests" / "runtime"))

from nccl_rules import NCCL_ONE_STREAM, NCCL_RULES
from ranks import run_ranks

from drystone.describe.families.huggingface import parse_config
from drystone.describe.model import ModelSpec
from drystone.describe.pool import parse_pool
from drystone.describe.recipe import Precision, Recipe
from drystone.plan.cells.search import cell_plan, search_cells
from drystone.plan.executable import marked
from drystone.plan.plan import Plan, save_plan
from drystone.run.train.collectives import Wire
from drystone.run.train.config import RankConfig
from drystone.run.train.verify import run_folder
from drystone.run.verify.plans import every_kind_of_plan
from drystone.run.verify.ranks import losses_of, rank_gpus, read_reports
from figures import print_figures

NUM_STEPS = 2


def models() -> list[ModelSpec]:
    """Three kinds, each with a head of its own and with a tied one."""
    found = []
    for is_tied in (False, True):
        for kv_heads in (8, 2):
            name = f"llama-kv{kv_heads}{'-tied' if is_tied else ''}"
            config = {
                "model_type": "llama", "hidden_size": 64, "intermediate_size": 96,
                "num_hidden_layers": 8, "num_attention_heads": 8, "num_key_value_heads": kv_heads,
                "vocab_size": 128, "max_position_embeddings": 16, "tie_word_embeddings": is_tied,
            }  # fmt: skip
            found.append(parse_config(config, where=name, name=name))
        config = {
            "model_type": "gpt2", "n_embd": 64, "n_layer": 8, "n_head": 8, "vocab_size": 128,
            "n_positions": 16, "tie_word_embeddings": is_tied,
        }  # fmt: skip
        name = f"gpt2{'-tied' if is_tied else ''}"
        found.append(parse_config(config, where=name, name=name))
    return found


def every_plan(model: ModelSpec, num_gpus: int) -> dict[str, Plan]:
    """All of the space that is executed, by layout."""
    pool = parse_pool(f"{num_gpus}xA100-80G")
    recipe = Recipe(seq_len=16, global_batch=16, precision=Precision.FP32)
    found = every_kind_of_plan(model, recipe, pool)
    (group,) = pool.groups
    cells = search_cells(model, recipe, group.machine, (num_gpus,))
    for index in range(len(cells.step_seconds)):
        plan = marked(cell_plan(model, cells, index, group))
        if not plan.not_executable:
            found[f"{cells.layout(index)} {plan.recipe.recompute}"] = plan
    return found


def train_all(folder: Path) -> None:
    """What one rank does."""
    run_folder(folder, RankConfig(num_steps=NUM_STEPS, seed=7), Wire())


def run(plans: dict[str, Plan], backend: str) -> list[str]:
    """What was wrong with any of them."""
    with tempfile.TemporaryDirectory() as name:
        folder = Path(name)
        for index, plan in enumerate(plans.values()):
            save_plan(plan, folder / f"{index:04d}.plan")
        num_ranks = len(rank_gpus(next(iter(plans.values()))))
        problems = []
        try:
            run_ranks(train_all, num_ranks, folder, backend=backend)
        except Exception as error:  # told, and what was not reached is counted below
            problems.append(str(error).strip().splitlines()[-1])
        first: dict[int, float] = {}
        for index, layout in enumerate(plans):
            losses = losses_of(read_reports(folder / f"{index:04d}.reports"))
            first = first or losses
            if len(losses) < NUM_STEPS:
                problems.append(f"{layout}: ended after {len(losses)} steps")
            elif any(not math.isclose(losses[at], first[at], rel_tol=1e-5) for at in first):
                problems.append(f"{layout}: losses {losses}, others {first}")
        return problems


def main() -> None:
    """Choose, run, print."""
    parser = argparse.ArgumentParser()
    parser.add_argument("--gpus", default="2,4,8")
    parser.add_argument("--most", type=int, default=60, help="plans a model and number of GPUs")
    parser.add_argument("--seed", type=int, default=0)
    given = parser.parse_args()
    chance = random.Random(given.seed)
    num_plans = num_run = 0
    problems: list[str] = []
    for count in map(int, given.gpus.split(",")):
        for model in models():
            plans = every_plan(model, count)
            chosen = sorted(chance.sample(sorted(plans), min(given.most, len(plans))))
            backend = chance.choice((NCCL_RULES, NCCL_ONE_STREAM))
            began = time.monotonic()
            wrong = run({name: plans[name] for name in chosen}, backend)
            num_plans, num_run = num_plans + len(plans), num_run + len(chosen)
            problems += [f"{count} GPUs, {model.name}: {problem}" for problem in wrong]
            print(f"{count} GPUs  {model.name:<16} {len(chosen):>4} of {len(plans):>4} plans  "
                  f"{backend:<16} {len(wrong)} problems  {time.monotonic() - began:.0f} s",
                  flush=True)  # fmt: skip
    print(*problems, sep="\n")
    print_figures({"plans": num_plans, "run": num_run, "problems": len(problems)})
    sys.exit(bool(problems))


if __name__ == "__main__":
    main()
