"""`drystone frontier`: how early jobs finish for how much money, in theory and under policies."""

from __future__ import annotations

import math
from collections.abc import Sequence
from pathlib import Path
from typing import Annotated

import typer
from rich.text import Text

from drystone.cli.columns import counted
from drystone.cli.options import AsJson, complete_policies, takes_groups
from drystone.cli.output import Column, make_console, print_table, printable
from drystone.cli.simulate_setup import Request, Setup, TraceFile, TraceOptions, set_up
from drystone.errors import InvalidSpec
from drystone.observe.frontier import DEAF, FrontierPoint, cheapest_meeting, is_fixed
from drystone.schedule.budget.frontier import Frontier
from drystone.units import format_seconds


@takes_groups
def frontier(
    *,
    trace: TraceFile,
    market: Annotated[Path, typer.Option(help="Nodes to rent: a YAML file.")],
    policy: Annotated[
        str,
        typer.Option(
            help="Names, joined by commas. One that does not rent, or is written fixed:NAME, gets "
            "as many nodes as the budget pays for all the time. constant and steady are opponents "
            "at their best setting in hindsight: one width, or one multiplier, for all jobs.",
            autocompletion=complete_policies,
        ),
    ] = "budget,constant,steady,prices",
    budgets: Annotated[
        str, typer.Option(help="Dollars an hour, joined by commas; none: from just enough on.")
    ] = "",
    target_hours: Annotated[
        float, typer.Option(help="The least money for this mean completion time.", min=0)
    ] = 0.0,
    options: TraceOptions,
    plot: Annotated[Path | None, typer.Option(help="Draw it into a .png, .svg or .pdf.")] = None,
    as_json: AsJson = False,
) -> None:
    """Draw mean completion time against budget.

    Each policy is simulated at several budgets, beside the best that is possible in theory. One
    simulation of 60 jobs takes a second or a few, a policy needs five, a target six more; constant
    and steady need some twenty, whatever the number of budgets.

    With --json: {trace, market, num_jobs, notes, theory: {spend_dollars_per_hour: [...],
    mean_completion_seconds: [...]}, points: [...], target: null or {hours,
    theory_dollars_per_hour, theory_dollars, policies: {name: point or null}}}.
    """
    from drystone.cli.simulate import find_policies
    from drystone.observe.frontier import FIXED, arrival_hours, theoretical_frontier
    from drystone.run.simulate.faults import FaultSpec

    find_policies(policy.replace(FIXED, ""))
    names = list(dict.fromkeys(name.strip() for name in policy.split(",") if name.strip()))
    request = options.request(trace=trace, market=market, faults=FaultSpec(seed=options.seed))
    if plot is not None:  # refused now, not after minutes
        from drystone.observe.plots import load_pyplot

        load_pyplot(plot)
    setup = set_up(request)
    theory = theoretical_frontier(setup.scenario)
    target_seconds = target_hours * 3600 if target_hours else math.nan
    if target_hours:
        theory.least_budget(target_seconds)  # says so if nobody could
    points = _simulate(setup, theory, names, _budgets(budgets, theory), target_seconds)
    title = f"{request.trace.name}: {counted(len(setup.scenario.jobs), 'job')}"
    if plot is not None:
        from drystone.observe.plots import plot_frontier

        plot_frontier(theory, points, plot, title=title, target_seconds=target_seconds)
    if as_json:
        _print_json(request, setup, theory, points, names, target_hours)
        return
    from drystone.cli.output import say_made

    print_points(title, theory, points, setup.notes)
    if target_hours:
        print_target(theory, points, names, target_seconds, arrival_hours(setup.scenario))
    if plot is not None:
        say_made("Drawn", plot)


def _budgets(text: str, theory: Frontier) -> list[float]:
    from drystone.observe.frontier import usual_budgets

    if not text:
        return usual_budgets(theory)
    try:
        found = sorted({float(part) for part in text.split(",") if part.strip()})
    except ValueError:
        raise InvalidSpec(f"--budgets {text!r} cannot be read", hint="Write 20,40,80") from None
    if not found or not all(math.isfinite(budget) and budget > 0 for budget in found):
        raise InvalidSpec("budgets must be above 0", hint="Write 20,40,80")
    return found


def _simulate(
    setup: Setup, theory: Frontier, names: list[str], budgets: list[float], target_seconds: float
) -> list[FrontierPoint]:
    from drystone.cli.output import track
    from drystone.observe.frontier import hindsight_points, reach_target, simulate_point
    from drystone.observe.opponents import HINDSIGHT

    points: list[FrontierPoint] = []
    for name in track([name for name in names if name in HINDSIGHT], "Looking for opponents"):
        points += hindsight_points(setup.scenario, theory, name, budgets)
    wanted = [
        (name, budget)
        for name in names
        if name not in HINDSIGHT
        for budget in (budgets[:1] if name in DEAF else budgets)
    ]
    for name, budget in track(wanted, "Simulating each policy at each budget"):
        point = simulate_point(setup.scenario, setup.on_nodes, theory, name, budget)
        if point is not None:
            points.append(point)
    if math.isfinite(target_seconds):
        names = [name for name in names if name not in DEAF | HINDSIGHT]
        for name in track(names, "Looking for the target"):
            points += reach_target(setup.scenario, setup.on_nodes, theory, name, target_seconds)
    return points


def _print_json(
    request: Request,
    setup: Setup,
    theory: Frontier,
    points: list[FrontierPoint],
    names: list[str],
    target_hours: float,
) -> None:
    from drystone.cli.output import print_json
    from drystone.observe.frontier import arrival_hours

    target = None
    if target_hours:
        least = theory.least_budget(target_hours * 3600)
        met = {name: cheapest_meeting(points, name, target_hours * 3600) for name in names}
        target = {
            "hours": target_hours,
            "theory_dollars_per_hour": least,
            "theory_dollars": least * arrival_hours(setup.scenario),
            "policies": {name: point.to_json() if point else None for name, point in met.items()},
        }
    print_json(
        {
            "trace": str(request.trace),
            "market": str(request.market),
            "num_jobs": len(setup.scenario.jobs),
            "notes": list(setup.notes),
            "theory": {
                "spend_dollars_per_hour": theory.spend_dollars_per_hour.tolist(),
                "mean_completion_seconds": theory.mean_completion_seconds.tolist(),
            },
            "points": [point.to_json() for point in points],
            "target": target,
        }
    )


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
    found = dict.fromkeys(point.policy for point in points)
    order = {name: row for row, name in enumerate(sorted(found, key=_is_opponent))}
    ordered = sorted(points, key=lambda point: (order[point.policy], point.budget_dollars_per_hour))
    print_table(printable(title), columns, [_row(point) for point in ordered])
    console = make_console()
    least, most = (float(theory.spend_dollars_per_hour[end]) for end in (0, -1))
    slowest, fastest = (float(theory.mean_completion_seconds[end]) for end in (0, -1))
    console.print()
    lines = [
        f"In theory: from {format_seconds(slowest)} for ${least:,.2f} an hour, the least that "
        f"keeps up, to {format_seconds(fastest)} for ${most:,.2f}.",
        "Spent is all the money over the hours in which jobs arrived, and the best possible is for "
        "just that (so the plot counts too), on GPUs rented one by one and at once for jobs that "
        "arrive for ever at the trace's rates.",
    ]
    if any(map(_is_opponent, order)):
        lines.append(
            "constant:N, steady:MU: all jobs on N GPUs, or at one multiplier; of those within "
            "the budget the earliest, known in hindsight."
        )
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


def _is_opponent(policy: str) -> bool:
    from drystone.observe.opponents import HINDSIGHT

    return policy in HINDSIGHT


def _row(point: FrontierPoint) -> list[str]:
    budget = point.budget_dollars_per_hour
    mean, theory = point.mean_completion_seconds, point.theory_seconds
    return [
        point.setting or point.policy,
        f"{budget:,.2f}" if math.isfinite(budget) else "-",
        f"{point.arrival_dollars_per_hour:,.2f}",
        "-" if math.isnan(mean) else format_seconds(mean),
        "-" if math.isnan(theory) else format_seconds(theory),
        "-" if math.isnan(theory) or math.isnan(mean) else f"{mean / theory:.2f}",
        f"{point.num_done}/{point.num_jobs}",
        f"${point.spent_dollars:,.2f}",
    ]
