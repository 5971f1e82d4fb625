"""What would a traced module cost: memory on each rank, the least time of a step, dollars?

A trace knows bytes exactly and FLOPs by kind of operator, but not how long its kernels take. So the
time is a lower bound: all FLOPs at the pace of the GPU's best matrix multiplication.
"""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import asdict, dataclass
from typing import Any

from drystone.describe.generations import generation_of
from drystone.describe.gpu import GpuSpec
from drystone.describe.gpu_prices import Price
from drystone.describe.layout import Layout, Sharding
from drystone.describe.machine import Machine
from drystone.describe.recipe import Offload, Precision, Recipe
from drystone.errors import InvalidSpec
from drystone.estimate.launchers import Launcher, find_launcher
from drystone.estimate.learned.residuals import memory_range
from drystone.estimate.memory.peak import context_bytes, workspace_bytes
from drystone.estimate.module.trace import DTYPE_BYTES, OUTSIDE, ModuleTrace, Phase, Span


@dataclass(frozen=True, slots=True, kw_only=True)
class TracedMemory:
    """Bytes on one rank at its peak moment; the items add up to it."""

    weights_bytes: float  # with buffers
    gradients_bytes: float
    optimizer_bytes: float
    activations_bytes: float  # with inputs, logits, and what the running block borrows
    gathered_bytes: float  # gathered weights and communication buffers
    step_bytes: float  # temporaries of the optimizer step
    phase: Phase  # when it peaks

    @property
    def allocated_bytes(self) -> float:
        """What torch calls max allocated."""
        state = self.weights_bytes + self.gradients_bytes + self.optimizer_bytes
        return state + self.activations_bytes + self.gathered_bytes + self.step_bytes


def traced_memory(trace: ModuleTrace, recipe: Recipe, layout: Layout) -> TracedMemory:
    """The peak of one rank under data parallelism with ZeRO 0 to 3, on one pipeline stage."""
    _check(trace, recipe, layout)
    split = _Split.of(trace, recipe, layout)
    return max(_moments(trace, split), key=lambda moment: moment.allocated_bytes)


@dataclass(frozen=True, slots=True, kw_only=True)
class _Split:
    """What the layout and the launcher make of the traced bytes."""

    weights_bytes: float
    optimizer_bytes: float
    buckets_bytes: float
    gradient_factor: float  # width of a kept gradient against the traced one
    gradient_share: float  # of the gradients that a rank keeps
    step_share: float  # of the parameters that a rank updates
    gradients_persist: bool  # they are there before the micro-batch begins
    gathered_blocks: float  # blocks whose weights are gathered at once; 0 without ZeRO-3
    root_stays_gathered: bool

    @classmethod
    def of(cls, trace: ModuleTrace, recipe: Recipe, layout: Layout) -> _Split:
        launcher = find_launcher(recipe.launcher)
        ranks = layout.shard_size or layout.dp
        sharded = layout.sharding if ranks > 1 else Sharding.NONE
        optimizer_share = 1 / ranks if sharded >= Sharding.ZERO1 else 1.0
        keeps_state = recipe.offload is not Offload.OPTIMIZER
        micro_batches = recipe.global_batch // (layout.dp * layout.micro_batch)
        gathers = sharded is Sharding.ZERO3
        weights_share = 1 / ranks if gathers else 1.0
        return cls(
            weights_bytes=trace.weights_bytes * weights_share + trace.buffers_bytes,
            optimizer_bytes=trace.optimizer_bytes * optimizer_share * keeps_state,
            buckets_bytes=_buckets_bytes(trace, layout, sharded, launcher),
            gradient_factor=_gradient_factor(trace, recipe, launcher),
            gradient_share=1 / ranks if sharded >= Sharding.ZERO2 else 1.0,
            step_share=optimizer_share * keeps_state,
            gradients_persist=micro_batches > 1 or launcher.gradients_persist,
            gathered_blocks=launcher.gathered_layers if gathers else 0.0,
            root_stays_gathered=launcher.root_stays_gathered or layout.keep_gathered,
        )


def _moments(trace: ModuleTrace, split: _Split) -> Iterator[TracedMemory]:
    """Every moment that could be the peak."""
    kept_share = split.gradient_share * split.gradient_factor
    all_gradients = trace.gradients_bytes * kept_share
    gradients = all_gradients if split.gradients_persist else 0.0
    alive = float(trace.inputs_bytes)
    for span in trace.timeline:
        yield TracedMemory(
            weights_bytes=split.weights_bytes,
            gradients_bytes=gradients,
            optimizer_bytes=split.optimizer_bytes,
            activations_bytes=alive + span.peak_bytes,
            gathered_bytes=_gathered_bytes(trace, split, span) + split.buckets_bytes,
            step_bytes=0.0,
            phase=span.phase,
        )
        alive += span.change_bytes - span.gradients_bytes
        if not split.gradients_persist:
            gradients += span.gradients_bytes * kept_share
    yield TracedMemory(
        weights_bytes=split.weights_bytes,
        gradients_bytes=all_gradients,
        optimizer_bytes=split.optimizer_bytes,
        activations_bytes=float(trace.inputs_bytes),
        gathered_bytes=split.buckets_bytes,
        step_bytes=trace.step_temporaries_bytes * split.step_share,
        phase=Phase.STEP,
    )


def _gathered_bytes(trace: ModuleTrace, split: _Split, span: Span) -> float:
    """Whole weights that ZeRO-3 holds while this span runs."""
    if not split.gathered_blocks:
        return 0.0
    root = float(trace.outside.weights_bytes)
    if span.block == OUTSIDE:
        return root
    blocks = split.gathered_blocks * trace.blocks[span.block].weights_bytes
    return blocks + (root if split.root_stays_gathered else 0.0)


def _buckets_bytes(
    trace: ModuleTrace, layout: Layout, sharded: Sharding, launcher: Launcher
) -> float:
    if layout.dp == 1:
        return 0.0
    if sharded is Sharding.NONE and launcher.copies_buckets:
        return float(trace.gradients_bytes)
    return launcher.bucket_elements * DTYPE_BYTES[trace.request.dtype]


def _gradient_factor(trace: ModuleTrace, recipe: Recipe, launcher: Launcher) -> float:
    if not trace.request.has_master:
        return 1.0
    is_fp16 = recipe.precision is Precision.FP16_MIXED
    width = launcher.fp16_gradient_bytes if is_fp16 else launcher.bf16_gradient_bytes
    return width / DTYPE_BYTES[trace.request.dtype]


def _check(trace: ModuleTrace, recipe: Recipe, layout: Layout) -> None:
    for axis, name in (("tp", "tensor"), ("pp", "pipeline"), ("cp", "context"), ("ep", "expert")):
        if getattr(layout, axis) > 1:
            raise InvalidSpec(
                f"layout: {axis}={getattr(layout, axis)}, but nobody knows how to split a traced "
                f"module by {name} parallelism",
                hint="Use dp with zero=0 to 3, or describe the model by a config.json",
            )
    if recipe.offload not in (Offload.NONE, Offload.OPTIMIZER):
        raise InvalidSpec(
            f"offload={recipe.offload.value} is not known for a traced module",
            hint="Use offload none or optimizer",
        )
    asked = (layout.micro_batch, recipe.seq_len, recipe.recompute.kind, recipe.recompute.every)
    request = trace.request
    traced = (request.micro_batch, request.seq_len, request.recompute, request.recompute_every)
    if asked != traced:
        raise InvalidSpec(
            f"the trace is of (micro_batch, seq_len, recompute) = {traced}, not of {asked}",
            hint="Trace again with trace_request(recipe=..., layout=...)",
        )


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
    context = float(context_bytes(int(layout.dp > 1), find_launcher(recipe.launcher)))
    required = memory.allocated_bytes + workspace_bytes(machine.gpu) + context
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
