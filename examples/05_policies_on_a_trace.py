"""5. Policies on a trace: the same 20 jobs and the same cluster under three policies."""

from pathlib import Path

from drystone.cli.simulate_setup import Request, set_up
from drystone.observe.simulation import run_policy

FOLDER = Path(__file__).resolve().parent / "simulate"

scenario = set_up(
    Request(trace=FOLDER / "jobs.csv", cluster=FOLDER / "cluster.yaml", most_jobs=20)
).scenario
for policy in ("fifo", "cells", "prices"):
    report = run_policy(scenario, policy).report
    hours = report.mean_completion_seconds / 3600
    bound = report.lower_bound_ratio
    print(f"{policy}: {report.num_done} done, {hours:.2f} h on average, {bound:.2f} x the bound")
