"""How does the time of a decision of `prices` grow with the cluster? A table and a plot.

    python benchmarks/decision_growth.py --plot growth.png

100 to 100,000 GPUs of four types, a fifth as many jobs as GPUs; each size is measured three times
and the median shown: the first decision, which has no prices to begin with and places every job,
and one with jobs running and a quarter new. CPU seconds; the guide in the plot is exactly linear.
"""

from __future__ import annotations

import argparse
import sys
from pathlib import Path

import numpy as np

sys.path.insert(0, str(Path(__file__).parent))
from drystone.describe.cluster import NodeSpec, make_nodes
from figures import print_figures
from prices import measure

SIZES = (100, 1_000, 10_000, 100_000)
JOBS_PER_GPU = 0.2


def main() -> None:
    """Print a line for each size, with the exponent of growth since the size before."""
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--plot", type=Path, default=None, help="a PNG file")
    parser.add_argument("--repeats", type=int, default=3)
    options = parser.parse_args()
    print(f"{'GPUs':>8} {'jobs':>7} {'first':>10} {'next':>10} {'gap':>7} {'exponent':>9}")
    rows: list[tuple[int, float, float]] = []
    measure(nodes_of(SIZES[0]), 20)  # what is loaded at the first use is no part of a decision
    for size in SIZES:
        nodes = nodes_of(size)
        num_gpus = sum(node.num_gpus for node in nodes)
        found = [measure(nodes, int(size * JOBS_PER_GPU)) for _ in range(options.repeats)]
        first, second, gap = (float(np.median(one)) for one in zip(*found, strict=True))
        growth = ""
        if rows:
            growth = f"{np.log(second / rows[-1][2]) / np.log(num_gpus / rows[-1][0]):.2f}"
        rows.append((num_gpus, first, second))
        print(
            f"{num_gpus:>8} {int(size * JOBS_PER_GPU):>7} {first * 1e3:>7.1f} ms "
            f"{second * 1e3:>7.1f} ms {gap:>7.2%} {growth:>9}",
            flush=True,
        )
    gpus, first_seconds, next_seconds = (list(one) for one in zip(*rows, strict=True))
    # From 1,000 GPUs on: below, what a decision costs whatever its size is most of it.
    steps = np.polyfit(np.log(gpus[1:]), np.log(np.array((first_seconds, next_seconds)).T[1:]), 1)
    print_figures(
        {
            "first_exponent": steps[0, 0],
            "next_exponent": steps[0, 1],
            "gpus": gpus,
            "first_seconds": first_seconds,
            "next_seconds": next_seconds,
        }
    )
    if options.plot is not None:
        draw(rows, options.plot)
        print(f"plot in {options.plot}")


def nodes_of(num_gpus: int) -> list[NodeSpec]:
    """A quarter of the GPUs of each type, on nodes as in Arena's cluster."""
    shape = (("A100", 4), ("V100", 16), ("A40", 2), ("A10", 2))
    return [
        node
        for gpu, size in shape
        for node in make_nodes(gpu, count=max(1, round(num_gpus / 4 / size)), gpus_per_node=size)
    ]


def draw(rows: list[tuple[int, float, float]], path: Path) -> None:
    """Seconds over GPUs, both logarithmic, with a linear guide through the second size."""
    import matplotlib

    matplotlib.use("Agg")
    from matplotlib import pyplot

    gpus, first, second = (np.array(one) for one in zip(*rows, strict=True))
    figure, axes = pyplot.subplots(figsize=(7, 4.5), layout="constrained")
    axes.loglog(gpus, first, "o-", color="#b5532a", label="first decision")
    axes.loglog(gpus, second, "o-", color="#2a6f97", label="later decisions")
    axes.loglog(gpus, second[-1] * gpus / gpus[-1], "--", color="0.6", label="linear")
    axes.set_xlabel("GPUs (a fifth as many jobs)")
    axes.set_ylabel("CPU seconds a decision")
    axes.set_title("prices: the time of a decision")
    axes.grid(visible=True, which="major", color="0.9")
    axes.legend(frameon=False)
    for x, y in zip(gpus, second, strict=True):
        text = f"{y * 1e3:.0f} ms" if y < 1 else f"{y:.1f} s"
        axes.annotate(text, (x, y), textcoords="offset points", xytext=(4, -14), fontsize=8)
    figure.savefig(path, dpi=150)
    pyplot.close(figure)


if __name__ == "__main__":
    main()
