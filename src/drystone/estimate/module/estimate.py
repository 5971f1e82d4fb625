"""What would a traced module cost: memory on each rank, the least time of a step, dollars?

A trace knows bytes exactly and FLOPs by kind of operator, but not how long its kernels take. So the
time is a lower bound: all FLOPs at the pace of the GPU's best matrix multiplication.
"""

from __future__ import annotations

from dataclasses import asdict, dataclass
from typing import Any

from drystone.describe.generations import generation_of
from drystone.describe.gpu import GpuSpec
from drystone.describe.gpu_prices import Price
from drystone.describe.layout import Layout
from drystone.describe.machine import Machine
from drystone.describe.recipe import Precision, Recipe
from drystone.estimate.learned.residuals import memory_range
from drystone.estimate.memory.stage import context_bytes, workspace_bytes
from drystone.estimate.module.memory import TracedMemory, traced_memory
from drystone.estimate.module.trace import ModuleTrace

_FULL_WIDTH = (Precision.FP32, Precision.TF32)


@dataclass(frozen=True, slots=True, kw_only=True)
class TracedEstimate:
    """A traced module on one layout."""

    name: str
    trace: ModuleTrace
    recipe: Recipe
    layout: Layout
    machine: Machine
    memory: TracedMemory
    required_bytes: float  # allocated, workspaces and context
    low_bytes: float
    high_bytes: float
    least_step_seconds: float
    price: Price | None

    @property
    def fits(self) -> bool:
        """Whether the upper end is on the GPU."""
        return self.high_bytes <= self.machine.gpu.usable_bytes

    def to_json(self) -> dict[str, Any]:
        """The documented shape of `drystone estimate module.py:function --json`."""
        trace, gpu = self.trace, self.machine.gpu
        memory = asdict(self.memory) | {
            "allocated_bytes": self.memory.allocated_bytes,
            "required_bytes": self.required_bytes,
            "low_bytes": self.low_bytes,
            "high_bytes": self.high_bytes,
        }
        return {
            "model": {
                "name": self.name,
                "module": trace.module,
                "parameters": trace.num_params,
                "trainable_parameters": trace.num_trainable_params,
                "blocks": trace.num_blocks,
                "blocks_traced": trace.num_blocks_traced,
                "torch_version": trace.torch_version,
            },
            "recipe": asdict(self.recipe) | {"recompute": str(self.recipe.recompute)},
            "layout": asdict(self.layout)
            | {"text": str(self.layout), "gpus": self.layout.num_gpus},
            "gpu": {"name": gpu.name, "usable_bytes": gpu.usable_bytes, "source": gpu.source},
            "fits": self.fits,
            "memory": memory,
            "one_device_peak_bytes": trace.peak_bytes,
            "speed": {
                "forward_flops": trace.forward_flops,
                "backward_flops": trace.backward_flops,
                "least_step_seconds": self.least_step_seconds,
            },
        }


def estimate_traced(
    name: str,
    trace: ModuleTrace,
    recipe: Recipe,
    layout: Layout,
    machine: Machine,
    *,
    price: Price | None = None,
) -> TracedEstimate:
    """Everything that a trace can say of one layout."""
    memory = traced_memory(trace, recipe, layout)
    required = (
        memory.allocated_bytes + workspace_bytes(machine.gpu) + context_bytes(int(layout.dp > 1))
    )
    low, high = memory_range()
    return TracedEstimate(
        name=name,
        trace=trace,
        recipe=recipe,
        layout=layout,
        machine=machine,
        memory=memory,
        required_bytes=required,
        low_bytes=required * low,
        high_bytes=required * high,
        least_step_seconds=_least_seconds(trace, recipe, layout, machine),
        price=price,
    )


def best_flops(gpu: GpuSpec, recipe: Recipe) -> float:
    """Operations a second of the GPU's best matrix multiplication in the recipe's precision."""
    peak = gpu.fp32_flops if recipe.precision in _FULL_WIDTH else (gpu.bf16_flops or gpu.fp16_flops)
    ceiling = gpu.measured_bf16_flops or peak * generation_of(gpu).ceiling_share
    return min(peak or gpu.fp32_flops, ceiling or gpu.fp32_flops)


def _least_seconds(trace: ModuleTrace, recipe: Recipe, layout: Layout, machine: Machine) -> float:
    num_micro = -(-recipe.global_batch // (layout.dp * layout.micro_batch))
    flops = trace.forward_flops + trace.backward_flops
    return num_micro * flops / best_flops(machine.gpu, recipe)
