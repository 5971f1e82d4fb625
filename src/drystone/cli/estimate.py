"""`drystone estimate`: what one layout of one model would cost, itemised."""

from __future__ import annotations

from pathlib import Path
from typing import TYPE_CHECKING, Annotated

import typer

from drystone.cli.options import (
    AsJson,
    ClusterFile,
    ConfigFiles,
    ModelName,
    complete_gpus,
    takes_groups,
    words,
)
from drystone.cli.request import RecipeOptions

if TYPE_CHECKING:
    from drystone.describe.gpu_prices import Price
    from drystone.describe.layout import Layout
    from drystone.describe.machine import Machine
    from drystone.describe.model import ModelSpec
    from drystone.describe.model_source import ModuleReference
    from drystone.describe.recipe import Recipe
    from drystone.estimate.module.estimate import TracedEstimate
    from drystone.estimate.whole import Estimate


_USUAL_LAYOUT = "dp=1"


@takes_groups
def estimate(
    model: ModelName = "",
    *,
    config: ConfigFiles = None,
    gpu: Annotated[
        str,
        typer.Option(
            "--gpu", help="A GPU type (see `drystone gpus`).", autocompletion=complete_gpus
        ),
    ],
    layout: Annotated[
        str, typer.Option(help="dp, tp, pp, cp, ep, micro, zero, shard, sp, vpp, schedule, keep.")
    ] = _USUAL_LAYOUT,
    global_batch: Annotated[
        int,
        typer.Option(
            "--batch",
            "--global-batch",
            help="Sequences in a step; none: one micro-batch on every data rank.",
        ),
    ] = 0,
    recompute: Annotated[str, typer.Option(help="none, selective, full, or full/2.")] = "none",
    objective: Annotated[
        str,
        typer.Option(
            help="next-token, dpo or reward: the last two count batches in pairs of sequences.",
            autocompletion=words("next-token", "dpo", "reward"),
        ),
    ] = "next-token",
    recipe: RecipeOptions,
    cluster: ClusterFile = None,
    gpus_per_node: Annotated[int, typer.Option(help="0: as usual for the GPU.")] = 0,
    network: Annotated[str, typer.Option(help="Between nodes, e.g. 'InfiniBand HDR'.")] = "",
    price: Annotated[
        float, typer.Option(help="Dollars per GPU and hour; 0: the cheapest example price.")
    ] = 0.0,
    profile: Annotated[
        Path | None, typer.Option(help="A measured profile (see `drystone profile`).")
    ] = None,
    observed: Annotated[
        Path | None,
        typer.Option(help="A CSV of what your own runs took: it corrects this estimate."),
    ] = None,
    kernels: Annotated[
        str, typer.Option(help="Of a traced module: cuda, or cpu as torch's MemTracker counts.")
    ] = "cuda",
    explain: Annotated[
        bool, typer.Option("--explain", help="Name the source of each item.")
    ] = False,
    must_fit: Annotated[
        bool, typer.Option("--must-fit", help="Exit with 3 if it does not fit.")
    ] = False,
    as_json: AsJson = False,
) -> None:
    """Estimate one layout: memory by item, step time, dollars.

    Memory is that of the hungriest pipeline stage, item by item, against what the GPU has; the step
    is compute, communication, bubble and optimizer. Nothing is run, and no GPU is needed.

    With --json: {model, recipe, layout, gpu, fits, memory: {hungriest_stage, stages: [{stage,
    moment, items, allocated_bytes, reserved_bytes, device_bytes, required_bytes, low_bytes,
    high_bytes, fits, risk}], sources}, speed: {items_seconds, step_seconds, tokens_per_second,
    tokens_per_second_per_gpu, model_flops_utilisation, sources}, learned: {memory, speed: {factor,
    width_share, num_readings, parts}}, price}.
    """
    from drystone.cli.output import print_json
    from drystone.cli.request import own_price, read_cluster, say_own
    from drystone.describe.catalogue import find_gpu
    from drystone.describe.gpu_prices import cheapest_price
    from drystone.describe.layout import parse_layout
    from drystone.describe.machine import default_machine
    from drystone.describe.model_source import ModuleReference, resolve_model
    from drystone.errors import InvalidSpec, NothingFits

    read_cluster(cluster)
    gpu_spec = find_gpu(gpu)
    found: ModelSpec | ModuleReference
    if config:
        from drystone.cli.configs import ConfigRequest

        request = ConfigRequest.read(config, None)
        setup = request.asked.setup
        found, recipe = request.shape(model), request.options(recipe)
        split = parse_layout(layout) if layout != _USUAL_LAYOUT else setup.layout()
        global_batch = global_batch or setup.global_batch(split.num_gpus)
        recompute = str(setup.recompute) if recompute == "none" else recompute
    else:
        found, split = resolve_model(model), parse_layout(layout)
    machine = default_machine(gpu_spec, gpus_per_node=gpus_per_node or None, inter=network or None)
    wanted = recipe.recipe(
        None if isinstance(found, ModuleReference) else found,
        global_batch=global_batch or split.dp * split.micro_batch,
        recompute=recompute,
        gpus=[gpu_spec],
    )
    wanted = request.recipe(wanted) if config else wanted
    rent = own_price(gpu_spec, price) if price else cheapest_price(gpu_spec.name)
    answer: Estimate | TracedEstimate
    if isinstance(found, ModuleReference):
        if objective != "next-token":
            raise InvalidSpec(f"objective {objective!r} of a traced module is its own business")
        answer = _trace(found, wanted, split, machine, rent, kernels)
    else:
        answer = _estimate(found, wanted, split, machine, rent, profile, observed, objective)
    if as_json:
        print_json(answer.to_json())
    else:
        _show(answer, explain=explain)
        say_own([gpu_spec])
    if must_fit and not answer.fits:
        raise NothingFits(f"{model or 'the config'} does not fit on {gpu_spec.name} as {split}")


def _estimate(
    model: ModelSpec,
    recipe: Recipe,
    layout: Layout,
    machine: Machine,
    price: Price | None,
    profile: Path | None,
    observed: Path | None,
    objective: str,
) -> Estimate:
    from drystone.cli.request import parse_word
    from drystone.estimate.preference import Objective, estimate_objective

    compared = parse_word(Objective, objective, "objective")
    measured = None
    if profile is not None:
        from drystone.estimate.learned.profile import load_profile

        measured = load_profile(profile)
    if observed is not None:
        from drystone.estimate.learned.profile import Profile
        from drystone.observe.check.readings import Asked, load_readings

        asked = Asked(model=model, recipe=recipe, layout=layout, machine=machine)
        measured = measured or Profile(device=machine.gpu.name)
        readings = measured.readings + load_readings(observed, asked)
        measured = measured.model_copy(update={"readings": readings})
    return estimate_objective(
        model, recipe, layout, machine, compared, price=price, profile=measured
    )


def _trace(
    found: ModuleReference,
    recipe: Recipe,
    layout: Layout,
    machine: Machine,
    price: Price | None,
    kernels: str,
) -> TracedEstimate:
    from drystone.cli.output import make_console
    from drystone.cli.request import parse_word
    from drystone.estimate.module.estimate import estimate_traced
    from drystone.estimate.module.trace import Kernels
    from drystone.estimate.module.tracer import trace_module, trace_request

    request = trace_request(
        found.path,
        found.function,
        recipe=recipe,
        layout=layout,
        kernels=parse_word(Kernels, kernels, "kernels"),
    )
    with make_console(stderr=True).status(f"Tracing {found.function}() ..."):
        trace = trace_module(request)
    name = f"{found.path.name}:{found.function}"
    return estimate_traced(name, trace, recipe, layout, machine, price=price)


def _show(answer: Estimate | TracedEstimate, *, explain: bool) -> None:
    from drystone.estimate.whole import Estimate

    if isinstance(answer, Estimate):
        from drystone.cli.estimate_view import print_estimate

        print_estimate(answer, explain=explain)
    else:
        from drystone.cli.estimate_view import print_traced

        print_traced(answer)
