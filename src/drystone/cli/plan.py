"""`drystone plan`: the ranked ways to run one job, on given GPUs or on whatever would do."""

from __future__ import annotations

from pathlib import Path
from typing import TYPE_CHECKING, Annotated

import typer

from drystone.cli.names import complete_pool
from drystone.cli.recipe_options import (
    AsJson,
    AttentionWord,
    Compiled,
    Dropout,
    LauncherName,
    LoraRank,
    LossWord,
    ModelName,
    OffloadWord,
    OptimizerWord,
    PrecisionWord,
    SeqLen,
    StepKernelWord,
    TuningWord,
)

if TYPE_CHECKING:
    from drystone.describe.model import ModelSpec
    from drystone.describe.pool import Pool
    from drystone.describe.recipe import Recipe


def plan(
    model: ModelName,
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
    seq_len: SeqLen = 0,
    global_batch: Annotated[int, typer.Option(help="Sequences in a step.", min=1)] = 256,
    precision: PrecisionWord = "auto",
    optimizer: OptimizerWord = "adam",
    step_kernel: StepKernelWord = "fused",
    attention: AttentionWord = "fused",
    loss: LossWord = "plain",
    tuning: TuningWord = "full",
    lora_rank: LoraRank = 16,
    offload: OffloadWord = "none",
    compiled: Compiled = False,
    dropout: Dropout = 0.0,
    launcher: LauncherName = "drystone",
    network: Annotated[str, typer.Option(help="Between unlike nodes, e.g. 'Ethernet 100'.")] = "",
    prices: Annotated[
        str, typer.Option(help="Your own, e.g. A100-80G=1.80,V100-32G=0.90; else examples.")
    ] = "",
    most: Annotated[int, typer.Option(help="How many plans to show.", min=1)] = 8,
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
    GPUs are named {model, recipe, answers: [{gpu, smallest, cheapest, fastest}]}.
    """
    from drystone.cli.estimate_request import auto_precision, build_recipe
    from drystone.cli.plan_request import find_pool, find_prices, find_shape, read_cluster
    from drystone.describe.layout import Layout

    shape = find_shape(model)
    recipe = build_recipe(
        shape, Layout(), seq_len=seq_len, global_batch=global_batch,
        precision=auto_precision(precision), optimizer=optimizer, step_kernel=step_kernel,
        recompute="none", attention=attention, loss=loss, tuning=tuning, lora_rank=lora_rank,
        offload=offload, compiled=compiled, dropout=dropout, launcher=launcher,
    )  # fmt: skip
    chooses = precision == "auto"
    file = read_cluster(cluster)
    dollars = find_prices(prices, file)
    if gpus or (file is not None and file.nodes):
        pool = find_pool(gpus, network, file)
        _plan_pool(shape, recipe, pool, dollars, chooses, most, explain, plot, save, as_json)
    else:
        _find_gpus(shape, recipe, dollars, most, as_json)


def _plan_pool(
    shape: ModelSpec,
    recipe: Recipe,
    pool: Pool,
    prices: dict[str, float],
    chooses_precision: bool,
    most: int,
    explain: bool,
    plot: Path | None,
    save: Path | None,
    as_json: bool,
) -> None:
    from drystone.cli.output import make_console, print_json, say_made
    from drystone.cli.plan_request import say_own
    from drystone.plan.plan import save_plan
    from drystone.plan.refusal import refuse
    from drystone.plan.search import plan_job

    with make_console(stderr=True).status(f"Planning {shape.name} on {pool} ..."):
        found = plan_job(
            shape, recipe, pool, dollars_per_gpu_hour=prices, chooses_precision=chooses_precision
        )
        if not found.plans:
            refusal = refuse(shape, recipe, pool, found, dollars_per_gpu_hour=prices)
            raise refusal.error()
    if plot is not None:
        from drystone.observe.plan_plot import plot_plans

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
                "plans": [one.to_json() for one in found.plans[:most]],
            }
        )
        return
    from drystone.cli.plan_view import print_plans

    print_plans(found.plans, most=most, explain=explain)
    say_own(group.gpu for group in pool.groups)
    for path, what in ((plot, "Drawn"), (save, "Saved")):
        if path is not None:
            say_made(what, path)


def _find_gpus(
    shape: ModelSpec, recipe: Recipe, prices: dict[str, float], most: int, as_json: bool
) -> None:
    from drystone.cli.output import make_console, print_json
    from drystone.describe.catalogue import load_gpus
    from drystone.errors import NothingFits
    from drystone.plan.smallest import find_gpus_for

    with make_console(stderr=True).status(f"Looking for GPUs for {shape.name} ..."):
        answers = find_gpus_for(shape, recipe, load_gpus(), dollars_per_gpu_hour=prices)
    if not answers:
        raise NothingFits(
            f"{shape.name}: no GPU type does, up to 64 of it",
            hint="Try --offload optimizer, --tuning lora, or name more GPUs with --gpus",
        )
    if as_json:
        from drystone.describe.files.json_shapes import to_plain

        rows = [
            {"gpu": one.gpu, "smallest": one.smallest.to_json(), "cheapest": one.cheapest.to_json(),
             "fastest": one.fastest.to_json()}
            for one in answers
        ]  # fmt: skip
        print_json({"model": shape.name, "recipe": to_plain(recipe), "answers": rows})
        return
    from drystone.cli.plan_view import print_answers

    print_answers(answers, most=most)
