"""`drystone frontier`: how early jobs finish for how much money, in theory and under policies."""

from __future__ import annotations

import math
from collections.abc import Sequence
from pathlib import Path
from typing import TYPE_CHECKING, Annotated

import typer
from rich.text import Text

from drystone.cli.columns import counted
from drystone.cli.names import complete_policies
from drystone.cli.output import Column, make_console, print_table, printable
from drystone.errors import InvalidSpec
from drystone.observe.frontier import DEAF, FrontierPoint, cheapest_meeting, is_fixed
from drystone.schedule.budget.frontier import Frontier
from drystone.units import format_seconds

if TYPE_CHECKING:
    from drystone.cli.simulate_setup import Request, Setup
    from drystone.observe.frontier import FrontierPoint
    from drystone.schedule.budget.frontier import Frontier


def frontier(
    trace: Annotated[Path, typer.Option(help="Jobs: our CSV, sacct output, or a public trace.")],
    market: Annotated[Path, typer.Option(help="Nodes to rent: a YAML file.")],
    policy: Annotated[
        str,
        typer.Option(
            help="Names, joined by commas. One that does not rent, or is written fixed:NAME, gets "
            "as many nodes as the budget pays for all the time.",
            autocompletion=complete_policies,
        ),
    ] = "budget,prices",
    budgets: Annotated[
        str, typer.Option(help="Dollars an hour, joined by commas; none: from just enough on.")
    ] = "",
    target_hours: Annotated[
        float, typer.Option(help="The least money for this mean completion time.", min=0)
    ] = 0.0,
    speeds: Annotated[
        Path | None, typer.Option(help="Measured step times; without it, as `simulate` has it.")
    ] = None,
    part: Annotated[str, typer.Option(help="Which trace, where the file holds several.")] = "",
    arena: Annotated[bool, typer.Option("--arena", help="As `simulate --arena`.")] = False,
    divide_work: Annotated[float, typer.Option(help="Shorten every job by this.", min=1e-9)] = 1.0,
    most_jobs: Annotated[int, typer.Option(help="Only the first so many; 0: all.", min=0)] = 0,
    scaling: Annotated[
        str, typer.Option(help="Of jobs with durations: rigid, linear, or amdahl:0.05.")
    ] = "rigid",
    type_speeds: Annotated[
        str, typer.Option(help="Of jobs with durations: types are `equal`, or differ by `peak`.")
    ] = "equal",
    restart_seconds_per_gpu: Annotated[
        float, typer.Option(help="What a start costs, for each GPU ...", min=0)
    ] = 10.0,
    restart_most_seconds: Annotated[float, typer.Option(help="... and at most.", min=0)] = 40.0,
    seed: Annotated[int, typer.Option(help="Of what goes wrong.")] = 0,
    plot: Annotated[Path | None, typer.Option(help="Draw it into a .png, .svg or .pdf.")] = None,
    as_json: Annotated[bool, typer.Option("--json", help="For programs.")] = False,
) -> None:
    """Draw mean completion time against budget.

    Each policy is simulated at several budgets, beside the best that is possible in theory. One
    simulation of 60 jobs takes a second or a few, a policy needs five, a target six more.

    With --json: {trace, market, num_jobs, notes, theory: {spend_dollars_per_hour: [...],
    mean_completion_seconds: [...]}, points: [...], target: null or {hours,
    theory_dollars_per_hour, theory_dollars, policies: {name: point or null}}}.
    """
    from drystone.cli.simulate import find_policies, find_scaling
    from drystone.cli.simulate_setup import Request, set_up
    from drystone.observe.frontier import FIXED, arrival_hours, theoretical_frontier
    from drystone.run.simulate.faults import FaultSpec
    from drystone.schedule.snapshot import StartupCost

    find_policies(policy.replace(FIXED, ""))
    names = list(dict.fromkeys(one.strip() for one in policy.split(",") if one.strip()))
    request = Request(
        trace=trace, market=market, speeds=speeds, part=part, arena=arena, divide_work=divide_work,
        most_jobs=most_jobs, scaling=find_scaling(scaling, type_speeds),
        startup=StartupCost(
            seconds_per_gpu=restart_seconds_per_gpu, most_seconds=restart_most_seconds
        ),
        faults=FaultSpec(seed=seed),
    )  # fmt: skip
    if plot is not None:  # refused now, not after minutes
        from drystone.observe.plots import load_pyplot

        load_pyplot(plot)
    setup = set_up(request)
    theory = theoretical_frontier(setup.scenario)
    target_seconds = target_hours * 3600 if target_hours else math.nan
    if target_hours:
        theory.least_budget(target_seconds)  # says so if nobody could
    points = _simulate(setup, theory, names, _budgets(budgets, theory), target_seconds)
    if plot is not None:
        from drystone.observe.plots import plot_frontier

        title = f"{trace.name}: {counted(len(setup.scenario.jobs), 'job')}"
        plot_frontier(theory, points, plot, title=title, target_seconds=target_seconds)
    if as_json:
        _print_json(request, setup, theory, points, names, target_hours)
        return
    from drystone.cli.frontier import print_points, print_target
    from drystone.cli.output import say_made

    print_points(
        f"{trace.name}: {counted(len(setup.scenario.jobs), 'job')}", theory, points, setup.notes
    )
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
    if not found or not all(math.isfinite(one) and one > 0 for one in found):
        raise InvalidSpec("budgets must be above 0", hint="Write 20,40,80")
    return found


def _simulate(
    setup: Setup, theory: Frontier, names: list[str], budgets: list[float], target_seconds: float
) -> list[FrontierPoint]:
    from drystone.cli.output import track
    from drystone.observe.frontier import DEAF, reach_target, simulate_point

    wanted = [
        (name, budget) for name in names for budget in (budgets[:1] if name in DEAF else budgets)
    ]
    points = []
    for name, budget in track(wanted, "Simulating each policy at each budget"):
        point = simulate_point(setup.scenario, setup.on_nodes, theory, name, budget)
        if point is not None:
            points.append(point)
    if math.isfinite(target_seconds):
        for name in track([one for one in names if one not in DEAF], "Looking for the target"):
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
    from drystone.observe.frontier import arrival_hours, cheapest_meeting

    target = None
    if target_hours:
        least = theory.least_budget(target_hours * 3600)
        met = {name: cheapest_meeting(points, name, target_hours * 3600) for name in names}
        target = {
            "hours": target_hours,
            "theory_dollars_per_hour": least,
            "theory_dollars": least * arrival_hours(setup.scenario),
            "policies": {name: one.to_json() if one else None for name, one in met.items()},
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
            "points": [one.to_json() for one in points],
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
