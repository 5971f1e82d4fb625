"""Plans to try on the devices of a machine: one of every kind that the planner can choose there."""

from __future__ import annotations

from dataclasses import dataclass, replace

import numpy as np

from drystone.describe.families.huggingface import parse_config
from drystone.describe.layout import Layout
from drystone.describe.model import ModelSpec
from drystone.describe.pool import GpuGroup, Pool, make_pool
from drystone.describe.recipe import Precision, Recipe, Recompute, RecomputeKind, auto_precision
from drystone.errors import DrystoneError
from drystone.plan.cells.search import cell_plan, search_cells
from drystone.plan.executable import marked
from drystone.plan.groups.pipelines import plan_groups
from drystone.plan.plan import Plan, Way
from drystone.plan.uneven.data_parallel import plan_uneven

SEED = 7


@dataclass(frozen=True, slots=True, kw_only=True)
class Scale:
    """Size of the model that is tried: small on a processor, large enough to occupy a GPU."""

    hidden_size: int
    num_layers: int
    vocab_size: int
    seq_len: int
    global_batch: int


ON_PROCESSOR = Scale(hidden_size=64, num_layers=8, vocab_size=512, seq_len=32, global_batch=16)
ON_GPU = Scale(hidden_size=1024, num_layers=16, vocab_size=32_000, seq_len=1024, global_batch=32)


def small_model(scale: Scale, *, is_tied: bool) -> ModelSpec:
    """A Llama of a few layers, whose head shares the embedding's weights or not."""
    config = {
        "model_type": "llama",
        "hidden_size": scale.hidden_size,
        "intermediate_size": 2 * scale.hidden_size,
        "num_hidden_layers": scale.num_layers,
        "num_attention_heads": scale.hidden_size // 16 if scale.hidden_size < 512 else 16,
        "num_key_value_heads": scale.hidden_size // 16 if scale.hidden_size < 512 else 8,
        "vocab_size": scale.vocab_size,
        "max_position_embeddings": scale.seq_len,
        "tie_word_embeddings": is_tied,
    }
    name = "small-llama-tied" if is_tied else "small-llama"
    return parse_config(config, where=name, name=name)


def recipe_for(scale: Scale, pool: Pool, *, is_emulated: bool) -> Recipe:
    """In fp32 on emulated devices, where losses can be compared to the last digits."""
    precision = Precision.FP32
    if not is_emulated:
        precision = auto_precision(group.gpu for group in pool.groups)
    return Recipe(seq_len=scale.seq_len, global_batch=scale.global_batch, precision=precision)


def plan_alone(model: ModelSpec, recipe: Recipe, pool: Pool) -> Plan:
    """Everything on one device: what all others are compared with."""
    first = pool.groups[0]
    return _planned(plan_uneven(model, recipe, make_pool([replace(first, count=1)])))


def every_kind_of_plan(model: ModelSpec, recipe: Recipe, pool: Pool) -> dict[str, Plan]:
    """Plans over all devices of a pool, by a short name: what the runtime executes, one a kind."""
    found: dict[str, Plan] = {}
    even = plan_uneven(model, recipe, pool)
    if isinstance(even, Plan):
        found[f"dp={pool.num_gpus}"] = even
        full = replace(recipe, recompute=Recompute(kind=RecomputeKind.FULL))
        again = plan_uneven(model, full, pool)
        if isinstance(again, Plan) and again.recipe.recompute != even.recipe.recompute:
            found[f"dp={pool.num_gpus}, recompute full"] = again
        if len(pool.groups) == 1:
            found["uneven shares"] = _made_uneven(even)
    if len(pool.groups) == 1:
        found |= _cells(model, recipe, pool.groups[0])
    else:
        piped = plan_groups(model, recipe, pool)
        if piped is not None and not marked(piped).not_executable:
            found["groups"] = piped
    return found


def _cells(model: ModelSpec, recipe: Recipe, group: GpuGroup) -> dict[str, Plan]:
    """The fastest Cell of every kind of split, schedule and sharding."""
    cells = search_cells(model, recipe, group.machine, (group.count,))
    found: dict[str, Plan] = {}
    for index in np.argsort(cells.step_seconds, kind="stable"):
        layout = cells.layout(int(index))
        name = _kind(layout)
        if layout.tp * layout.pp == 1 or name in found:
            continue
        plan = marked(cell_plan(model, cells, int(index), group))
        if not plan.not_executable:
            found[name] = plan
    return dict(sorted(found.items()))


def _kind(layout: Layout) -> str:
    words = [f"dp={layout.dp} tp={layout.tp} pp={layout.pp}"]
    if layout.pp > 1:
        words.append(layout.schedule.value)
    if layout.virtual_stages > 1:
        words.append(f"{layout.virtual_stages} virtual stages")
    if layout.dp > 1:
        words.append(f"zero {layout.sharding.value}")
    return ", ".join(words)


def _made_uneven(plan: Plan) -> Plan:
    """The same GPUs with unequal batches and state: what a mixed pool would need of them."""
    [stage] = plan.stages
    [share] = stage.ranks
    if share.count < 2 or share.batch < 2:
        return plan
    moved = share.batch // 2
    first = replace(
        share,
        count=1,
        batch=share.batch - moved,
        micro_batch=1,
        num_micro_batches=share.batch - moved,
        state_share=0.5 / share.count,
    )
    second = replace(
        share,
        count=1,
        batch=share.batch + moved,
        micro_batch=1,
        num_micro_batches=share.batch + moved,
        state_share=1.5 / share.count,
    )
    rest = replace(share, count=share.count - 2) if share.count > 2 else None
    ranks = (first, second, *([rest] if rest else []))
    return replace(plan, way=Way.UNEVEN, stages=(replace(stage, ranks=ranks),))


def _planned(found: object) -> Plan:
    if not isinstance(found, Plan):
        raise DrystoneError("the small model does not fit on one device", hint="Use --devices")
    return found
