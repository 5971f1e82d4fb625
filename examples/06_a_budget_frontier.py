"""6. A budget frontier: what is the least mean completion time for so much money an hour?"""

from pathlib import Path

from drystone.cli.simulate_setup import Request, set_up
from drystone.observe.frontier import theoretical_frontier

FOLDER = Path(__file__).resolve().parent / "simulate"

setup = set_up(Request(trace=FOLDER / "jobs.csv", market=FOLDER / "market.yaml", most_jobs=20))
frontier = theoretical_frontier(setup.scenario)
least = float(frontier.spend_dollars_per_hour[0])
for multiple in (1.1, 1.5, 2.0, 3.0):
    hours = frontier.at_budget(multiple * least).mean_completion_seconds / 3600
    print(f"${multiple * least:.2f} an hour: {hours:.2f} h on average")
one_hour = frontier.least_budget(3600.0)
print(f"for one hour on average: ${one_hour:.2f} an hour")
