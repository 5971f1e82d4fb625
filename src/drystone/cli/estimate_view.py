"""How an estimate looks in a terminal: memory as bars against the GPU, time as shares of a step."""

from __future__ import annotations

from rich.console import Console
from rich.table import Table
from rich.text import Text

from drystone.cli.output import HeadedTable, make_console
from drystone.describe.chosen import choices_of
from drystone.describe.recipe import Tuning
from drystone.estimate.learned.residuals import range_basis
from drystone.estimate.module.estimate import TracedEstimate
from drystone.estimate.parameters import count_model
from drystone.estimate.whole import Estimate, StageEstimate
from drystone.units import format_bytes, format_count, format_seconds

_BAR_WIDTH = 28
ITEM_WORDS = {
    "weights": "weights",
    "gradients": "gradients",
    "optimizer": "optimizer state",
    "activations": "activations",
    "logits": "logits and loss",
    "gathered": "gathered, buffers",
    "step": "step temporaries",
    "workspace": "workspace",
    "cache": "allocator cache",
    "context": "CUDA and NCCL",
    "reference": "reference model",
}


def print_estimate(estimate: Estimate, *, explain: bool) -> None:
    """Head, verdict, memory, time."""
    console = make_console()
    _print_head(console, estimate)
    tables = [_memory_table(estimate, explain=explain)]
    if len(estimate.stages) > 1:
        tables.append(_stage_table(estimate))
    tables.append(_speed_table(estimate, explain=explain))
    for table in tables:
        console.print(table)
        console.print()
    if explain:
        _print_learned(console, estimate)
    _print_summary(console, estimate)


def _print_learned(console: Console, estimate: Estimate) -> None:
    """What was learned from which runs, and what the stated range stands on."""
    for measure, found in estimate.learned.items():
        if not found.num_readings:
            console.print(f"{measure}: no reading has anything in common with this run")
            continue
        parts = ", ".join(
            f"{name} x {part:.3f}" for name, part in found.parts.items() if abs(part - 1) >= 0.0005
        )
        console.print(
            f"{measure}: x {found.factor:.3f} by {found.num_readings} readings of your own "
            f"({parts or 'as estimated'}); {found.width_share:.0%} of the range is left"
        )
    basis = range_basis(
        estimate.recipe.launcher, is_full=estimate.recipe.tuning is Tuning.FULL, reading="allocated"
    )
    for choice in choices_of(estimate.recipe.launcher, estimate.machine.gpu.architecture):
        sources = ", ".join(choice.num_runs) or "none"
        console.print(
            f"{choice.field} of {choice.owner_of(estimate.recipe.launcher)}: {choice.value:g}, "
            f"chosen by runs of {sources}",
            style="dim",
        )
    console.print(
        "Range of memory: " + ", ".join(f"{name} {share:.0%}" for name, share in basis),
        style="dim",
    )
    console.print()


def _print_head(console: Console, estimate: Estimate) -> None:
    counted, layout, recipe = count_model(estimate.model), estimate.layout, estimate.recipe
    active = f", {format_count(counted.active)} active" if counted.active != counted.total else ""
    console.print(
        Text.assemble(
            (estimate.model.name, "bold green"),
            f"  {format_count(counted.total)} parameters{active}, on ",
            (f"{layout.num_gpus} x {estimate.machine.gpu.name}", "bold cyan"),
            f" as {layout}",
        )
    )
    console.print(
        f"{recipe.seq_len} tokens x {recipe.global_batch} sequences a step, "
        f"{recipe.precision.value}, {recipe.optimizer.value}, recompute {recipe.recompute}, "
        f"{recipe.tuning.value} training, "
        f"conventions of {recipe.launcher}",
        style="dim",
    )
    console.print()


def _memory_table(estimate: Estimate, *, explain: bool) -> Table:
    stage, usable = estimate.hungriest, estimate.machine.gpu.usable_bytes
    where = f"stage {stage.stage}, the hungriest" if len(estimate.stages) > 1 else "each GPU"
    table = HeadedTable(f"Memory of {where}, at its peak ({_moment_words(stage.moment)})")
    table.add_column("item", style="bold")
    table.add_column("size", justify="right")
    table.add_column(f"of {format_bytes(usable)}", no_wrap=True)
    if explain:
        table.add_column("from", style="dim")
    for name, size in stage.items.items():
        if size < 1:
            continue
        source = (estimate.memory_sources[name],) if explain else ()
        table.add_row(ITEM_WORDS[name], format_bytes(size), bar(size / usable), *source)
    total_bar = bar(stage.device_bytes / usable, style="red" if not stage.fits else "green")
    table.add_row(Text("in all", style="bold"), format_bytes(stage.device_bytes), total_bar)
    return table


def _stage_table(estimate: Estimate) -> Table:
    table = HeadedTable("Memory by pipeline stage")
    for header in ("stage", "peak at", "weights", "activations", "no cache", "range"):
        table.add_column(header, justify="left" if header == "peak at" else "right")
    table.add_column("fits")
    for stage in _shown_stages(estimate.stages):
        table.add_row(
            str(stage.stage),
            stage.moment,
            format_bytes(stage.items["weights"]),
            format_bytes(stage.items["activations"]),
            format_bytes(stage.required_bytes),
            f"{format_bytes(stage.low_bytes)} to {format_bytes(stage.high_bytes)}",
            Text("yes", style="green") if stage.fits else Text("no", style="bold red"),
        )
    return table


def _shown_stages(stages: tuple[StageEstimate, ...]) -> tuple[StageEstimate, ...]:
    return stages if len(stages) <= 16 else (*stages[:8], *stages[-8:])


def _speed_table(estimate: Estimate, *, explain: bool) -> Table:
    speed = estimate.speed
    table = HeadedTable("Time of one step")
    table.add_column("item", style="bold")
    table.add_column("time", justify="right")
    table.add_column("share", no_wrap=True)
    if explain:
        table.add_column("from", style="dim")
    for name, seconds in speed.items.items():
        share = seconds / speed.step_seconds
        if share < 0.0005:
            continue
        source = (speed.sources[name],) if explain else ()
        length = bar(share, style="blue")
        table.add_row(name.replace("_", " "), format_seconds(seconds), length, *source)
    table.add_row(Text("in all", style="bold"), format_seconds(speed.step_seconds), "")
    return table


def _print_summary(console: Console, estimate: Estimate) -> None:
    stage, gpu, speed = estimate.hungriest, estimate.machine.gpu, estimate.speed
    verdict = ("fits", "bold green") if estimate.fits else ("does not fit", "bold red")
    if estimate.fits and stage.high_bytes > gpu.usable_bytes:
        verdict = (f"may fit, {stage.risk:.0%} of such runs do not", "bold yellow")
    console.print(
        Text.assemble(
            verdict,
            f": needs {format_bytes(stage.low_bytes)} to {format_bytes(stage.high_bytes)} of "
            f"{format_bytes(gpu.usable_bytes)} on each {gpu.name}"
            f"{', allocator cache left out' if stage.device_bytes > stage.required_bytes else ''}",
        )
    )
    pace = speed.tokens_per_second_per_gpu
    console.print(
        Text.assemble(
            (f"{pace * speed.num_gpus:,.0f} tokens/s", "bold"),
            f", {pace:,.0f} a GPU, {speed.model_flops_utilisation:.0%} of the peak (MFU), "
            f"{format_seconds(speed.step_seconds)} a step",
        )
    )
    price, dollars = estimate.price, estimate.dollars_per_billion_tokens
    if price is not None and dollars is not None:
        dated = f", {price.date}" if price.date else ""
        console.print(
            Text.assemble(
                (f"${dollars:,.0f} for a billion tokens", "bold yellow"),
                f" at ${price.on_demand_dollars_per_gpu_hour:.2f} a GPU and hour "
                f"({price.cloud}{dated})",
            )
        )


def bar(share: float, *, style: str = "cyan") -> Text:
    """A bar of the share, and the share in words; a bar that is too long is cut and marked."""
    cells = min(round(share * _BAR_WIDTH), _BAR_WIDTH)
    mark = "+" if share > 1 else ""
    return Text.assemble(("█" * cells + mark, style), f" {share:.1%}")


def _moment_words(moment: str) -> str:
    return {
        "loss": "computing the loss",
        "backward": "a layer's backward pass",
        "last": "the last layers of the backward pass",
        "step": "the optimizer step",
        "load": "loading the model",
    }[moment]


_WORDS = {
    "weights_bytes": "weights, buffers",
    "gradients_bytes": "gradients",
    "optimizer_bytes": "optimizer state",
    "activations_bytes": "activations",
    "gathered_bytes": "gathered, buffers",
    "step_bytes": "step temporaries",
}


def print_traced(estimate: TracedEstimate) -> None:
    """Head, memory, verdict."""
    console = make_console()
    trace, memory, gpu = estimate.trace, estimate.memory, estimate.machine.gpu
    console.print(
        Text.assemble(
            (estimate.name, "bold green"),
            f"  {trace.module}, {format_count(trace.num_params)} parameters, "
            f"{trace.num_blocks} blocks ({trace.num_blocks_traced} traced), on ",
            (f"{estimate.layout.num_gpus} x {gpu.name}", "bold cyan"),
            f" as {estimate.layout}",
        )
    )
    table = HeadedTable(f"Memory of each GPU, at its peak (in the {memory.phase.value} pass)")
    table.add_column("item", style="bold")
    table.add_column("size", justify="right")
    table.add_column(f"of {format_bytes(gpu.usable_bytes)}", no_wrap=True)
    for name, words in _WORDS.items():
        size = getattr(memory, name)
        if size >= 1:
            table.add_row(words, format_bytes(size), bar(size / gpu.usable_bytes))
    share = memory.allocated_bytes / gpu.usable_bytes
    style = "green" if estimate.fits else "red"
    table.add_row("allocated", format_bytes(memory.allocated_bytes), bar(share, style=style))
    console.print()
    console.print(table)
    console.print()
    verdict = ("fits", "bold green") if estimate.fits else ("does not fit", "bold red")
    console.print(
        Text.assemble(
            verdict,
            f": needs {format_bytes(estimate.low_bytes)} to {format_bytes(estimate.high_bytes)} "
            f"of {format_bytes(gpu.usable_bytes)} on each {gpu.name}",
        )
    )
    seconds = format_seconds(estimate.least_step_seconds)
    console.print(f"A step takes at least {seconds}: its FLOPs at the GPU's best pace")
