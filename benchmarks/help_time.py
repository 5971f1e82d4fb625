"""How long `drystone --help` takes: seconds, and as a multiple of starting Python at all.

The promise is 0.3 s. The best of several runs is compared, since a busy machine only ever adds.
"""

from __future__ import annotations

import subprocess
import sys
import time

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


def main() -> None:
    """Measure, print, and fail if the promise is broken."""
    empty_seconds = best_seconds("-c", "pass")
    help_seconds = best_seconds("-m", "drystone", "--help")
    print(f"python -c pass    {empty_seconds:.3f} s")
    print(
        f"drystone --help   {help_seconds:.3f} s, {help_seconds / empty_seconds:.1f} times as long"
    )
    if help_seconds > LIMIT_SECONDS:
        sys.exit(f"drystone --help takes {help_seconds:.3f} s, more than {LIMIT_SECONDS} s")


if __name__ == "__main__":
    main()
