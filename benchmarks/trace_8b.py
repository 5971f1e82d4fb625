"""How long does it take to trace an 8-billion-parameter model, and how close is it to MemTracker?

    python benchmarks/trace_8b.py [--reference]

Every run is a fresh process, so that importing torch and transformers is included: what a user
waits for. `--reference` also runs torch's own MemTracker over the full depth (a minute or more).
Promised: under 5 s, within 3 %, and under 1.5 GB of memory.
"""

from __future__ import annotations

import resource
import sys
import tempfile
import time
from pathlib import Path

from drystone.describe.recipe import StepKernel
from drystone.estimate.module.trace import Kernels, TraceRequest
from drystone.estimate.module.tracer import trace_module
from drystone.units import format_bytes
from figures import print_figures

SOURCE = """
def build():
    from transformers import LlamaConfig, LlamaForCausalLM
    return LlamaForCausalLM(LlamaConfig(hidden_size=4096, intermediate_size=14336,
        vocab_size=128256, num_hidden_layers=32, num_attention_heads=32, num_key_value_heads=8))
"""
NUM_RUNS = 5
PROMISED_SECONDS = 5.0


def main() -> None:
    """Print the wall time of each run, the peak, and what the process needed itself."""
    with tempfile.TemporaryDirectory() as folder:
        path = Path(folder, "llama.py")
        path.write_text(SOURCE)
        request = TraceRequest(path=str(path), function="build", micro_batch=1, seq_len=4096,
                               step_kernel=StepKernel.FOREACH, kernels=Kernels.CPU)  # fmt: skip
        seconds = []
        for run in range(NUM_RUNS):
            start = time.perf_counter()
            trace = trace_module(request, cache_folder=Path(folder, str(run)))
            seconds.append(time.perf_counter() - start)
        needed_bytes = resource.getrusage(resource.RUSAGE_CHILDREN).ru_maxrss * 1024
        print(f"parameters          {trace.num_params:,}")
        print(f"traced blocks       {trace.num_blocks_traced} of {trace.num_blocks}")
        print(f"predicted peak      {format_bytes(trace.peak_bytes)} ({trace.peak_bytes})")
        print("seconds, all in     " + ", ".join(f"{one:.2f}" for one in seconds))
        verdict = "kept" if min(seconds) < PROMISED_SECONDS else "NOT kept"
        print(f"best {min(seconds):.2f} s of promised {PROMISED_SECONDS:g} s: {verdict}")
        print(f"after the imports   {trace.trace_seconds:.2f} s (with those of the user's file)")
        print(f"process needed      {format_bytes(needed_bytes)}")
        start = time.perf_counter()
        trace_module(request, cache_folder=Path(folder, "0"))
        print(f"again, from cache   {(time.perf_counter() - start) * 1e3:.1f} ms")
        figures = {"seconds": min(seconds), "needed_bytes": needed_bytes}
        if "--reference" in sys.argv:
            figures["error"] = abs(_compare(request, trace.peak_bytes))
        print_figures(figures)


def _compare(request: TraceRequest, peak_bytes: int) -> float:
    sys.path.insert(0, str(Path(__file__).resolve().parents[1] / "tests" / "runtime"))
    from memtracker import memtracker_peak_bytes

    start = time.perf_counter()
    reference_bytes = memtracker_peak_bytes(request)
    seconds = time.perf_counter() - start
    print(f"MemTracker          {format_bytes(reference_bytes)} ({reference_bytes})")
    error = peak_bytes / reference_bytes - 1
    print(f"difference          {error:+.3%}, it took {seconds:.1f} s")
    return error


if __name__ == "__main__":
    main()
