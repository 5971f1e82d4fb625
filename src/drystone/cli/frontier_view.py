"""How a frontier looks in a terminal: a line for each policy at each budget, then the target."""

from __future__ import annotations

import math
from collections.abc import Sequence

from rich.text import Text

from drystone.cli.output import Column, make_console, print_table, printable
from drystone.observe.frontier import DEAF, FrontierPoint, cheapest_meeting, is_fixed
from drystone.schedule.budget.frontier import Frontier
from drystone.units import format_seconds


def print_points(
    title: str, theory: Frontier, points: Sequence[FrontierPoint], notes: Sequence[str]
) -> None:
    """What each policy made of each budget, beside the best possible for what it spent."""
    columns = [
        Column(header="policy", justify="left", style="bold"),
        Column(header="budget $/h"),
        Column(header="spent $/h"),
        Column(header="mean completion"),
        Column(header="best possible", rank=1),
        Column(header="x best", rank=1),
        Column(header="done", rank=1),
        Column(header="spent", rank=2),
    ]
    order = {name: row for row, name in enumerate(dict.fromkeys(one.policy for one in points))}
    ordered = sorted(points, key=lambda one: (order[one.policy], one.budget_dollars_per_hour))
    print_table(printable(title), columns, [_row(one) for one in ordered])
    console = make_console()
    least, most = (float(theory.spend_dollars_per_hour[end]) for end in (0, -1))
    slowest, fastest = (float(theory.mean_completion_seconds[end]) for end in (0, -1))
    console.print()
    lines = [
        f"In theory: from {format_seconds(slowest)} for ${least:,.2f} an hour, the least that "
        f"keeps up, to {format_seconds(fastest)} for ${most:,.2f}.",
        "The best possible is for all the money that was spent, over the hours in which jobs "
        "arrived (so the plot counts too), on GPUs rented one by one and at once for jobs that "
        "arrive for ever at the trace's rates.",
    ]
    if fixed := [name for name in order if is_fixed(name)]:
        lines.append(
            f"{', '.join(fixed)}: on a fixed set of nodes, as many as the budget pays for, of the "
            "offer that does the work for the least money."
        )
    if deaf := [name for name in order if name in DEAF]:
        lines.append(f"{', '.join(deaf)}: rents by a rule of its own and heeds no budget.")
    for line in [*lines, *(f"{note}." for note in notes)]:
        console.print(Text(printable(line), style="dim"), soft_wrap=True)


def print_target(
    theory: Frontier,
    points: Sequence[FrontierPoint],
    names: Sequence[str],
    target_seconds: float,
    arrival_hours: float,
) -> None:
    """The least money for a wanted mean completion time."""
    console = make_console()
    least = theory.least_budget(target_seconds)
    console.print()
    console.print(Text(f"For {format_seconds(target_seconds)} on average", style="bold"))
    console.print(
        f"  in theory at least ${least:,.2f} an hour, ${least * arrival_hours:,.2f} in all",
        soft_wrap=True,
    )
    for name in names:
        found = cheapest_meeting(points, name, target_seconds)
        if found is None:
            console.print(f"  {name}: not seen at any budget that was tried", soft_wrap=True)
            continue
        mean = format_seconds(found.mean_completion_seconds)
        console.print(
            f"  {name}: a budget of ${found.budget_dollars_per_hour:,.2f} an hour, "
            f"${found.spent_dollars:,.2f} in all; {mean} on average",
            soft_wrap=True,
        )


def _row(point: FrontierPoint) -> list[str]:
    budget = point.budget_dollars_per_hour
    mean, theory = point.mean_completion_seconds, point.theory_seconds
    return [
        point.policy,
        f"{budget:,.2f}" if math.isfinite(budget) else "-",
        f"{point.spent_dollars_per_hour:,.2f}",
        "-" if math.isnan(mean) else format_seconds(mean),
        "-" if math.isnan(theory) else format_seconds(theory),
        "-" if math.isnan(theory) or math.isnan(mean) else f"{mean / theory:.2f}",
        f"{point.num_done}/{point.num_jobs}",
        f"${point.spent_dollars:,.2f}",
    ]
