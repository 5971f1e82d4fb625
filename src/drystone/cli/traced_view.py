"""How the estimate of a traced module looks in a terminal."""

from __future__ import annotations

from rich.text import Text

from drystone.cli.estimate_view import bar
from drystone.cli.output import HeadedTable, make_console
from drystone.estimate.module.estimate import TracedEstimate
from drystone.units import format_bytes, format_count, format_seconds

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
