"""`drystone plan`: the ranked ways to run one job, on given GPUs or on whatever would do."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from itertools import groupby
from pathlib import Path
from typing import TYPE_CHECKING, Annotated

import typer
from rich.console import Console
from rich.measure import Measurement
from rich.table import Table
from rich.text import Text

from drystone.cli.estimate_view import ITEM_WORDS, bar
from drystone.cli.options import (
    AsJson,
    ConfigFiles,
    ModelName,
    Profiles,
    complete_pool,
    takes_groups,
    words,
)
from drystone.cli.output import HeadedTable, counted, make_console
from drystone.cli.request import RecipeOptions
from drystone.errors import InvalidSpec
from drystone.plan.answers import Answer
from drystone.plan.checkpoints import checkpoint_interval
from drystone.plan.configs.write import TARGETS
from drystone.plan.plan import Plan, StagePlan, Way
from drystone.units import GiB, format_bytes, format_seconds

if TYPE_CHECKING:
    from drystone.cli.configs import ConfigRequest
    from drystone.describe.model import ModelSpec
    from drystone.describe.pool import Pool
    from drystone.describe.recipe import Recipe
    from drystone.plan.search import PlanList

_USUAL_BATCH = 256


@takes_groups
def plan(
    model: ModelName = "",
    *,
    config: ConfigFiles = None,
    tool: Annotated[
        str,
        typer.Option(
            help="Only plans that this tool can express; none: as --config, any: all of them.",
            autocompletion=words("any", *TARGETS),
        ),
    ] = "",
    gpus: Annotated[
        str,
        typer.Option(
            help="GPUs there are, e.g. 8xA100-80G,8xV100-32G; none: which would do?",
            autocompletion=complete_pool,
        ),
    ] = "",
    cluster: Annotated[
        Path | None,
        typer.Option(help="A cluster file: its nodes where --gpus names none, its types, prices."),
    ] = None,
    global_batch: Annotated[
        int, typer.Option("--batch", "--global-batch", help="Sequences in a step.", min=1)
    ] = _USUAL_BATCH,
    recipe: RecipeOptions,
    network: Annotated[str, typer.Option(help="Between unlike nodes, e.g. 'Ethernet 100'.")] = "",
    prices: Annotated[
        str, typer.Option(help="Your own, e.g. A100-80G=1.80,V100-32G=0.90; else examples.")
    ] = "",
    limit: Annotated[
        int, typer.Option("--limit", "--most", help="How many plans to show.", min=1)
    ] = 8,
    profile: Profiles = None,
    explain: Annotated[bool, typer.Option("--explain", help="Itemise the winner.")] = False,
    plot: Annotated[
        Path | None, typer.Option(help="Draw time against price into this file.")
    ] = None,
    save: Annotated[
        Path | None, typer.Option(help="Write the winner as a plan that the runtime executes.")
    ] = None,
    as_json: AsJson = False,
) -> None:
    """Rank the ways to run a model on GPUs, equal or mixed.

    Without --gpus: on all nodes of --cluster, or else for each GPU type the smallest, the cheapest
    and the fastest number that would do. Micro-batch, recomputation, sharding and all degrees are
    chosen. Exit code 3: nothing fits, with the nearest miss and two ways out.

    With --json: {model, recipe, gpus, own_gpu_types, plans: [{format, plan, derived}]}, or where no
    GPUs are named {model, recipe, answers: [{gpu, smallest, cheapest, fastest}]}. With --config
    also config: {tools, unused, layout, recompute, fits, high_bytes, tokens_per_second}.
    """
    from drystone.cli.configs import ConfigRequest, find_search, for_tool
    from drystone.cli.request import find_pool, find_prices, find_shape, read_cluster, with_profile

    file = read_cluster(cluster)
    pool = find_pool(gpus, network, file) if gpus or (file and file.nodes) else None
    for path in profile or ():
        pool = with_profile(pool, path, network)
    request = ConfigRequest.read(config, pool) if config else None
    if request is not None:
        recipe = request.options(recipe)
        global_batch = request.global_batch if global_batch == _USUAL_BATCH else global_batch
    recipe = for_tool(tool, recipe)
    if not (model or request):
        raise InvalidSpec("no model is named", hint="drystone plan MODEL, or --config FILE")
    shape = request.shape(model) if request else find_shape(model)
    is_emulated = file is not None and not gpus and file.is_emulated
    wanted = recipe.recipe(shape, global_batch=global_batch, is_emulated=is_emulated)
    chooses = recipe.precision == "auto" and not is_emulated
    dollars = find_prices(prices, file)
    if request is not None:
        wanted = request.recipe(wanted)
    tools = request.asked.tools if request else ()
    search = find_search(tool, chooses, tools=tools, has_gpus=pool is not None)
    if pool is not None:
        _plan_pool(
            shape, wanted, pool, dollars, search, limit, explain, plot, save, as_json, request
        )
    else:
        _find_gpus(shape, wanted, dollars, chooses, limit, as_json, request)


def _plan_pool(
    shape: ModelSpec,
    recipe: Recipe,
    pool: Pool,
    prices: dict[str, float],
    search: Callable[..., PlanList],
    limit: int,
    explain: bool,
    plot: Path | None,
    save: Path | None,
    as_json: bool,
    request: ConfigRequest | None,
) -> None:
    from drystone.cli.output import make_console, print_json, say_made
    from drystone.cli.request import say_own
    from drystone.plan.answers import refuse
    from drystone.plan.plan import save_plan

    answer = request.estimate(shape, recipe, pool) if request else None
    with make_console(stderr=True).status(f"Planning {shape.name} on {pool} ..."):
        found = search(shape, recipe, pool, dollars_per_gpu_hour=prices)
        if not found.plans:
            if request is not None and not as_json:
                request.print(answer, found.plans)
            refusal = refuse(shape, recipe, pool, found, dollars_per_gpu_hour=prices)
            raise refusal.error()
    if plot is not None:
        from drystone.observe.plots import plot_plans

        plot_plans(found.plans, plot)
    if save is not None:
        save_plan(found.plans[0], save)
    if as_json:
        from drystone.describe.files.json_shapes import to_plain

        print_json(
            {
                "model": shape.name,
                "recipe": to_plain(recipe),
                "gpus": str(pool),
                "own_gpu_types": [group.gpu.name for group in pool.groups if group.gpu.is_own],
                "plans": [plan.to_json() for plan in found.plans[:limit]],
            }
            | ({"config": request.to_json(answer)} if request else {})
        )
        return
    if request is not None:
        request.print(answer, found.plans)
    print_plans(found.plans, limit=limit, explain=explain)
    say_own(group.gpu for group in pool.groups)
    for path, what in ((plot, "Drawn"), (save, "Saved")):
        if path is not None:
            say_made(what, path)


def _find_gpus(
    shape: ModelSpec,
    recipe: Recipe,
    prices: dict[str, float],
    chooses_precision: bool,
    limit: int,
    as_json: bool,
    request: ConfigRequest | None,
) -> None:
    from drystone.cli.output import make_console, print_json
    from drystone.describe.catalogue import load_gpus
    from drystone.errors import NothingFits
    from drystone.plan.answers import find_gpus_for

    with make_console(stderr=True).status(f"Looking for GPUs for {shape.name} ..."):
        answers = find_gpus_for(
            shape,
            recipe,
            load_gpus(),
            dollars_per_gpu_hour=prices,
            chooses_precision=chooses_precision,
        )
    if not answers:
        raise NothingFits(
            f"{shape.name}: no GPU type does, up to 64 of it",
            hint="Try --offload optimizer, --tuning lora, or name more GPUs with --gpus",
        )
    if as_json:
        from drystone.describe.files.json_shapes import to_plain

        rows = [
            {
                "gpu": answer.gpu,
                "smallest": answer.smallest.to_json(),
                "cheapest": answer.cheapest.to_json(),
                "fastest": answer.fastest.to_json(),
            }
            for answer in answers
        ]
        told = {"model": shape.name, "recipe": to_plain(recipe), "answers": rows}
        print_json(told | ({"config": request.to_json(None)} if request else {}))
        return
    if request is not None and request.asked.unused:
        unused = ", ".join(request.asked.unused)
        make_console().print(Text(f"Keys that were not used: {unused}"), soft_wrap=True)
    print_answers(answers, limit=limit)


_BAR_WIDTH = 10


def print_plans(plans: Sequence[Plan], *, limit: int, explain: bool) -> None:
    """The ranked table, the winner's reason, and its items if asked for."""
    console = make_console()
    first = plans[0]
    recipe = first.recipe
    console.print(
        Text.assemble(
            (first.model.name, "bold green"),
            f"  {recipe.seq_len} tokens x {recipe.global_batch} sequences a step, "
            f"{recipe.optimizer.value}, {recipe.tuning.value} training",
        )
    )
    console.print()
    _print_table(console, plans[:limit])
    console.print()
    console.print(Text.assemble(("1 ", "bold"), first.reason))
    marked = {plan.not_executable for plan in plans[:limit] if plan.not_executable}
    for gap in sorted(marked):
        console.print(Text(f"* {gap}", style="yellow"))
    if explain:
        _print_items(first)


def _print_table(console: Console, plans: Sequence[Plan]) -> None:
    """One table where there is room; else how each plan is split stands below, line by line."""
    wide = _plans_table(plans, tells_how=True)
    room = console.options.update(max_width=10_000)
    if Measurement.get(console, room, wide).maximum <= console.width:
        console.print(wide)
        return
    console.print(_plans_table(plans, tells_how=False))
    for number, plan in enumerate(plans, start=1):
        console.print()
        for index, line in enumerate(_how(plan).splitlines()):
            lead = f"{number:<3}" if index == 0 else "   "
            console.print(Text.assemble((lead, "bold"), line), soft_wrap=True)


def _plans_table(plans: Sequence[Plan], *, tells_how: bool) -> Table:
    table = HeadedTable(f"{counted(len(plans), 'way')}, the fastest first")
    table.add_column("", justify="right", style="bold")
    table.add_column("GPUs", style="cyan", no_wrap=True)
    if tells_how:
        table.add_column("how")
    table.add_column("memory", no_wrap=True)
    table.add_column("step", justify="right")
    table.add_column("tokens/s", justify="right", style="bold")
    table.add_column("$/B tokens", justify="right", style="yellow")
    for number, plan in enumerate(plans, start=1):
        dollars = plan.dollars_per_billion_tokens
        table.add_row(
            f"{number}*" if plan.not_executable else str(number),
            "\n".join(f"{count} x {gpu}" for gpu, count in plan.gpus.items()),
            *([_how(plan)] if tells_how else []),
            _memory_bars(plan),
            format_seconds(plan.step_seconds),
            f"{plan.tokens_per_second:,.0f}",
            f"{dollars:,.0f}" if dollars is not None else "-",
        )
    return table


def _how(plan: Plan) -> str:
    words = f"{plan.way.value}, {plan.recipe.precision.value}, recompute {plan.recipe.recompute}"
    if plan.layout is not None:
        return f"{words}\n{plan.layout}"
    if plan.way is Way.UNEVEN:
        shares = [
            f"{share.count} x {share.gpu}: {share.batch} sequences as "
            f"{share.num_micro_batches} x {share.micro_batch}, {share.state_share:.1%} of the state"
            for share in plan.stages[0].ranks
        ]
        return "\n".join([words, *shares])
    return "\n".join([words, *_stage_lines(plan.stages)])


def _stage_lines(stages: Sequence[StagePlan]) -> list[str]:
    """Stages of one group on one line: their layers, and the split of each."""
    lines = []
    for (gpu, tp, dp), same in groupby(stages, key=lambda s: (s.ranks[0].gpu, s.tp, s.dp)):
        layers = "+".join(str(stage.end_layer - stage.first_layer) for stage in same)
        lines.append(f"{gpu}: {layers} layers, tp={tp} dp={dp}")
    return lines


def _memory_bars(plan: Plan) -> Text:
    """One bar per GPU type, in their order: the upper end of what its hungriest rank needs."""
    needs = {need.gpu: need for need in plan.needs}
    lines = []
    for gpu in plan.gpus:
        need = needs[gpu]
        share = need.high_bytes / need.usable_bytes
        cells = min(round(share * _BAR_WIDTH), _BAR_WIDTH)
        text = Text.assemble(
            ("█" * cells, "green"),
            ("░" * (_BAR_WIDTH - cells), "dim"),
            f" {need.high_bytes / GiB:.0f}/{need.usable_bytes / GiB:.0f} GiB",
        )
        lines.append(text)
    return Text("\n").join(lines)


def _print_items(plan: Plan) -> None:
    console = make_console()
    for need in plan.needs:
        if not need.items:
            continue
        table = HeadedTable(f"Memory of {need.gpu}, stage {need.stage}")
        table.add_column("item", style="bold")
        table.add_column("size", justify="right")
        table.add_column(f"of {format_bytes(need.usable_bytes)}", no_wrap=True)
        for name, size in need.items.items():
            if size >= 1:
                words = ITEM_WORDS.get(name, name)
                table.add_row(words, format_bytes(size), bar(size / need.usable_bytes))
        total = sum(need.items.values())
        table.add_row("in all", format_bytes(total), bar(total / need.usable_bytes, style="green"))
        console.print()
        console.print(table)
    table = HeadedTable("Time of one step")
    table.add_column("item", style="bold")
    table.add_column("time", justify="right")
    table.add_column("share", no_wrap=True)
    for name, seconds in plan.time_items.items():
        share = seconds / plan.step_seconds
        if share >= 0.0005:
            words = name.replace("_", " ")
            table.add_row(words, format_seconds(seconds), bar(share, style="blue"))
    table.add_row("in all", format_seconds(plan.step_seconds), "")
    console.print()
    console.print(table)
    console.print()
    console.print(checkpoint_interval(plan).describe(plan.step_seconds))


def print_answers(answers: Sequence[Answer], *, limit: int) -> None:
    """What each GPU type would need, the cheapest for a token first."""
    console = make_console()
    table = HeadedTable(f"{answers[0].smallest.model.name}: which GPUs would do")
    table.add_column("GPU", style="cyan")
    for header in ("fewest", "cheapest", "$/B tokens", "fastest", "tokens/s"):
        table.add_column(header, justify="right")
    for answer in answers[:limit]:
        dollars = answer.cheapest.dollars_per_billion_tokens
        table.add_row(
            answer.gpu,
            str(answer.smallest.num_gpus),
            str(answer.cheapest.num_gpus),
            f"{dollars:,.0f}" if dollars is not None else "-",
            str(answer.fastest.num_gpus),
            f"{answer.fastest.tokens_per_second:,.0f}",
        )
    console.print(table)
    console.print()
    smallest = min(answers, key=lambda answer: answer.smallest.num_gpus)
    fastest = max(answers, key=lambda answer: answer.fastest.tokens_per_second)
    best = {
        "smallest": smallest.smallest,
        "cheapest": answers[0].cheapest,
        "fastest": fastest.fastest,
    }
    for word, plan in best.items():
        gpus = " + ".join(f"{count} x {gpu}" for gpu, count in plan.gpus.items())
        console.print(Text.assemble((f"{word:9}", "bold"), f"{gpus} as {plan.layout}"))
