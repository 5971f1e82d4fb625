"""Which form of a collective over unequal pieces is fastest? By size, on gloo.

    python benchmarks/runtime_collectives.py [--ranks 2 4] [--repeats 15]

Prints the median milliseconds of each form, interleaved; what the runtime would choose is starred.
"""

from __future__ import annotations

import argparse
import os
import statistics
import tempfile
import time
from itertools import pairwise
from pathlib import Path

import torch
import torch.distributed as dist
import torch.multiprocessing as mp

from drystone.run.train.collectives import Form, Wire, choose_gather, choose_reduce
from drystone.run.train.uneven.cuts import cut_by_shares
from figures import print_figures

KILOBYTES = (4, 16, 64, 256, 1024, 8192)
GATHERS = (Form.PADDED, Form.GROUPED)
REDUCES = (Form.PADDED, Form.GROUPED, Form.SPLIT)

Rows = list[tuple[str, int, dict[Form, float], Form]]


def measure(rank: int, num_ranks: int, folder: str, repeats: int) -> None:
    """One rank: every size and form; the first writes the table."""
    torch.set_num_threads(1)
    dist.init_process_group(
        "gloo", init_method=f"file://{folder}/store", rank=rank, world_size=num_ranks
    )
    wire = Wire()
    shares = [1.0] * (num_ranks - 1) + [3.0]
    rows: Rows = []
    for kilobytes in KILOBYTES:
        cuts = cut_by_shares(kilobytes * 256, shares)
        sizes = [end - start for start, end in pairwise(cuts)]
        flat, piece = torch.ones(cuts[-1]), torch.ones(sizes[rank])
        for kind, forms in (("gather", GATHERS), ("reduce", REDUCES)):
            seconds: dict[Form, list[float]] = {form: [] for form in forms}
            for _ in range(repeats + 2):
                for form in forms:
                    dist.barrier()
                    started = time.perf_counter()
                    if kind == "gather":
                        wire.gather(piece, flat, cuts, form).wait()
                    else:
                        wire.reduce(flat, piece, cuts, form).wait()
                    seconds[form].append(time.perf_counter() - started)
            choose = choose_gather if kind == "gather" else choose_reduce
            medians = {form: statistics.median(some[2:]) for form, some in seconds.items()}
            rows.append((kind, kilobytes, medians, choose(sizes, 4, "gloo")))
    if rank == 0:
        torch.save(rows, Path(folder) / "rows.pt")
    dist.barrier()
    dist.destroy_process_group()


def main() -> None:
    """Measure and print."""
    parser = argparse.ArgumentParser()
    parser.add_argument("--ranks", type=int, nargs="+", default=[2, 4])
    parser.add_argument("--repeats", type=int, default=15)
    given = parser.parse_args()
    os.environ["OMP_NUM_THREADS"] = "1"
    chosen_of_best = []
    for num_ranks in given.ranks:
        print(f"{num_ranks} ranks, pieces 1 : ... : 1 : 3, gloo, ms")
        print(f"{'':<8}{'KiB':>6}" + "".join(f"{form.value:>11}" for form in REDUCES))
        with tempfile.TemporaryDirectory() as folder:
            mp.spawn(measure, args=(num_ranks, folder, given.repeats), nprocs=num_ranks)
            rows: Rows = torch.load(Path(folder) / "rows.pt", weights_only=False)
        for kind, kilobytes, medians, chosen in rows:
            cells = [
                f"{medians[form] * 1e3:.2f}{'*' if form is chosen else ' '}"
                if form in medians
                else "- "
                for form in REDUCES
            ]
            print(f"{kind:<8}{kilobytes:>6}" + "".join(f"{cell:>11}" for cell in cells))
            chosen_of_best.append(medians[chosen] / min(medians.values()))
    print_figures({"chosen_of_best": statistics.median(chosen_of_best)})


if __name__ == "__main__":
    main()
