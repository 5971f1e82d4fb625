"""How long `drystone --help` takes: seconds, and as a multiple of starting Python at all.

The promise is 0.3 s. The best of several runs is compared, since a busy machine only ever adds.
"""

from __future__ import annotations

import resource
import subprocess
import sys
import time

from figures import print_figures

RUNS = 10
LIMIT_SECONDS = 0.3


def best_seconds(*arguments: str) -> float:
    """The shortest of several runs of `python ...`."""
    return min(run_seconds(*arguments) for _ in range(RUNS))


def run_seconds(*arguments: str) -> float:
    """One run of `python ...`, output thrown away."""
    start = time.perf_counter()
    subprocess.run([sys.executable, *arguments], stdout=subprocess.DEVNULL, check=True)
    return time.perf_counter() - start


def cpu_seconds(*arguments: str) -> float:
    """CPU time of one run, the least of several: what a busy machine does not blur."""
    found = []
    for _ in range(RUNS):
        before = resource.getrusage(resource.RUSAGE_CHILDREN)
        run_seconds(*arguments)
        after = resource.getrusage(resource.RUSAGE_CHILDREN)
        found.append(after.ru_utime + after.ru_stime - before.ru_utime - before.ru_stime)
    return min(found)


def main() -> None:
    """Measure, print, and fail if the promise is broken."""
    empty_seconds = best_seconds("-c", "pass")
    help_seconds = best_seconds("-m", "drystone", "--help")
    print(f"python -c pass    {empty_seconds:.3f} s")
    print(
        f"drystone --help   {help_seconds:.3f} s, {help_seconds / empty_seconds:.1f} times as long"
    )
    help_cpu_seconds = cpu_seconds("-m", "drystone", "--help")
    print(f"of CPU            {help_cpu_seconds:.3f} s")
    print_figures(
        {
            "help_seconds": help_seconds,
            "help_cpu_seconds": help_cpu_seconds,
            "times_python": help_seconds / empty_seconds,
        }
    )
    if help_seconds > LIMIT_SECONDS:
        sys.exit(f"drystone --help takes {help_seconds:.3f} s, more than {LIMIT_SECONDS} s")


if __name__ == "__main__":
    main()
