"""`--config` of `plan`: a training config of another tool as a request, and what it would cost."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass, fields, replace
from functools import partial
from pathlib import Path
from typing import TYPE_CHECKING, Any

from rich.text import Text

from drystone.cli.output import make_console
from drystone.cli.request import RecipeOptions
from drystone.errors import InvalidSpec, NothingFits, UnknownName
from drystone.plan.configs.read import Asked, read_configs
from drystone.plan.configs.write import TARGETS
from drystone.plan.configs.write_degrees import DEGREE_TOOLS

if TYPE_CHECKING:
    from drystone.describe.model import ModelSpec
    from drystone.describe.pool import Pool
    from drystone.describe.recipe import Recipe
    from drystone.estimate.whole import Estimate
    from drystone.plan.plan import Plan
    from drystone.plan.search import PlanList

_SAME_NAMES = ("seq_len", "precision", "optimizer", "attention", "loss", "tuning", "lora_rank",
               "offload", "compiled", "launcher", "expert_dispatch")  # fmt: skip


def _tokens_per_second(answer: Estimate) -> float:
    return float(answer.speed.tokens_per_second_per_gpu) * answer.layout.num_gpus


@dataclass(frozen=True, slots=True)
class ConfigRequest:
    """What configs ask for on some GPUs, and what the command line adds to it."""

    asked: Asked
    num_gpus: int

    @classmethod
    def read(cls, paths: Sequence[Path], pool: Pool | None) -> ConfigRequest:
        """The request of these files; GPUs of the command line count for those of the files."""
        asked = read_configs(paths, num_gpus=pool.num_gpus if pool else 0)
        return cls(asked, asked.setup.num_gpus)

    def options(self, given: RecipeOptions) -> RecipeOptions:
        """Recipe options as the config says; what the command line says otherwise counts."""
        usual = RecipeOptions()
        names = [entry.name for entry in fields(RecipeOptions)]
        changed = {
            name: getattr(given, name)
            for name in names
            if getattr(given, name) != getattr(usual, name)
        }
        said = {name: getattr(self.asked.setup, name) for name in _SAME_NAMES}
        return replace(given, **(said | changed))

    def shape(self, given: str) -> ModelSpec:
        """The model of the command line, or else of the config."""
        from drystone.cli.request import find_shape

        setup = self.asked.setup
        if not given and setup.shape is not None:
            return setup.shape
        if not (given or setup.model):
            raise InvalidSpec(
                "the config names no model", hint="Name it: drystone plan MODEL --config FILE"
            )
        return find_shape(given or setup.model)

    @property
    def global_batch(self) -> int:
        """Sequences in a step on these GPUs."""
        return self.asked.setup.global_batch(self.num_gpus)

    def recipe(self, recipe: Recipe) -> Recipe:
        """What no option of the command line says: the bits of frozen weights."""
        return replace(recipe, weight_bits=self.asked.setup.weight_bits)

    def estimate(self, model: ModelSpec, recipe: Recipe, pool: Pool) -> Estimate | None:
        """What the config as it is would cost; None on unlike GPUs, which no tool splits over."""
        from drystone.estimate.whole import estimate_layout

        if len(pool.groups) > 1:
            return None
        [group] = pool.groups
        setup = self.asked.setup
        as_asked = replace(recipe, recompute=setup.recompute)
        return estimate_layout(model, as_asked, setup.layout(pool.num_gpus), group.machine)

    def to_json(self, answer: Estimate | None) -> dict[str, Any]:
        """The `config` part of what `drystone plan --json` prints."""
        told: dict[str, Any] = {"tools": list(self.asked.tools), "unused": list(self.asked.unused)}
        if answer is not None:
            told |= {
                "layout": str(answer.layout),
                "recompute": str(answer.recipe.recompute),
                "fits": answer.fits,
                "high_bytes": answer.hungriest.high_bytes,
                "tokens_per_second": _tokens_per_second(answer),
            }
        return told

    def print(self, answer: Estimate | None, plans: Sequence[Plan]) -> None:
        """Tell it, before the table of plans."""
        console = make_console()
        for line in self.lines(answer, plans):
            console.print(Text(line), soft_wrap=True)
        console.print()

    def lines(self, answer: Estimate | None, plans: Sequence[Plan]) -> list[str]:
        """What fits, what would be faster, and which keys were not used, in words."""
        tools = " + ".join(dict.fromkeys(self.asked.tools))
        if answer is None:
            lines = [f"The {tools} config as it is: cannot be split over unlike GPUs"]
        else:
            need, room = answer.hungriest.high_bytes, answer.machine.gpu.usable_bytes
            speed = _tokens_per_second(answer)
            fits = "fits" if answer.fits else "DOES NOT FIT"
            lines = [
                f"The {tools} config as it is: {fits}, up to {need / 2**30:.1f} of "
                f"{room / 2**30:.1f} GiB, {speed:,.0f} tokens/s",
                f"  {answer.layout}, {answer.recipe.precision.value}, "
                f"recompute {answer.recipe.recompute}",
            ]
            if plans:
                gain = plans[0].tokens_per_second / speed
                same = "no plan is faster" if gain <= 1.005 else f"plan 1 has {gain:.2f}x its speed"
                lines.append(f"  {same if answer.fits else 'plan 1 fits'}")
        if self.asked.unused:
            lines.append("Keys that were not used: " + ", ".join(self.asked.unused))
        lines.append(f"{self.asked.num_inert} keys change neither memory nor speed")
        return lines


def for_tool(tool: str, recipe: RecipeOptions) -> RecipeOptions:
    """Options as `--tool` would run them, where the command line does not say otherwise."""
    if tool not in DEGREE_TOOLS or recipe.launcher != RecipeOptions().launcher:
        return recipe
    changed = {"launcher": DEGREE_TOOLS[tool].launcher}
    if tool == "torchtitan" and recipe.loss == "plain":
        changed["loss"] = "chunked"  # as all of its named configs
    return replace(recipe, **changed)  # type: ignore[arg-type]


def find_search(
    tool: str, chooses_precision: bool, *, tools: Sequence[str], has_gpus: bool
) -> Callable[..., PlanList]:
    """All ways to run a job, or those that a tool can express."""
    from drystone.plan.search import plan_job

    if tool not in ("", "any", *TARGETS):
        raise UnknownName("tool", tool, ["any", *TARGETS], where="--tool")
    if tool in TARGETS and not has_gpus:
        raise InvalidSpec("--tool needs GPUs to plan for", hint="Add --gpus 8xA100-80G")
    if tool == "any" or not (tool or tools):
        return partial(plan_job, chooses_precision=chooses_precision)
    wanted = tool or next((name for name in tools if name in DEGREE_TOOLS), "")
    if wanted in DEGREE_TOOLS:
        from drystone.plan.cells.search import RECOMPUTES
        from drystone.plan.configs.write_degrees import can_say
        from drystone.plan.search import plan_some_cells

        none, selective, full = RECOMPUTES
        known = (none, full) if wanted == "nemo" else (none, selective, full)
        may = partial(can_say, wanted)
        search = partial(plan_some_cells, may=may, recomputes=known)
        return partial(search, chooses_precision=chooses_precision)
    return partial(_search_plain, chooses_precision=chooses_precision)


def _search_plain(model: ModelSpec, recipe: Recipe, pool: Pool, **others: Any) -> PlanList:
    """Plans of data parallelism alone; where only other ways fit, that is said."""
    from drystone.plan.search import plan_data_parallel, plan_job

    found = plan_data_parallel(model, recipe, pool, **others)
    if not found.plans:
        every = plan_job(model, recipe, pool, **others)
        if every.plans:
            how = every.plans[0].layout or every.plans[0].way.value
            raise NothingFits(
                f"{model.name} fits on {pool}, but not by splitting data alone",
                hint=f"--tool any shows what fits: the fastest is {how}",
            )
    return found
