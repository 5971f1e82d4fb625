"""The oracle: torch's own MemTracker over the whole module, in the steady state (second step)."""

from dataclasses import replace

import torch
from torch._subclasses.fake_tensor import FakeTensorMode
from torch.distributed._tools.mem_tracker import MemTracker

from drystone.describe.recipe import Optimizer, StepKernel
from drystone.estimate.module.trace import TraceRequest
from drystone.run.train.tracing.blocks import find_blocks
from drystone.run.train.tracing.build import build_module, load_source, make_batch, materialise
from drystone.run.train.tracing.trace import _autocast, _recompute


class WholeTracker(MemTracker):
    """MemTracker without its peaks of single modules: nobody asks, and they take half its time."""

    def _update_peak_stats(self, peak_state) -> None:
        modules, self.memory_tracking = self.memory_tracking, {}
        super()._update_peak_stats(peak_state)
        self.memory_tracking = modules


_KERNELS = {
    StepKernel.FUSED: {"fused": True},
    StepKernel.FOREACH: {"foreach": True},
    StepKernel.LOOP: {"foreach": False},
}


def memtracker_peak_bytes(request: TraceRequest) -> int:
    """What MemTracker says of the second training step, with AdamW, at full depth."""
    assert request.optimizer is Optimizer.ADAM
    source = load_source(request.path)
    module = build_module(source, request.function, request.path)
    blocks = find_blocks(module, replace(request, is_whole=True))
    with FakeTensorMode(allow_non_fake_inputs=True):
        materialise(module, getattr(torch, request.dtype))
        _freeze_into_buffers(module)
        batch = make_batch(module, source, request)
        for block in blocks.every:
            if block.is_recomputed:
                _recompute(block.module)
        optimizer = torch.optim.AdamW(module.parameters(), **_KERNELS[request.step_kernel])

        def step() -> None:
            with _autocast(request):
                loss = batch.loss_of(module, source)
            loss.backward()
            del loss
            optimizer.step()
            optimizer.zero_grad()

        step()
        tracker = WholeTracker()
        inputs = [*batch.args, *batch.kwargs.values()]
        tensors = [one for one in inputs if isinstance(one, torch.Tensor)]
        tracker.track_external(module, optimizer, *tensors)
        with tracker:
            step()
    return tracker.get_tracker_snapshot("peak")[torch.device("cpu")]["Total"]


def _freeze_into_buffers(module: torch.nn.Module) -> None:
    """MemTracker hooks every parameter's gradient and fails on those that never get one."""
    for one in module.modules():
        for name, param in list(one._parameters.items()):
            if param is not None and not param.requires_grad:
                del one._parameters[name]
                one.register_buffer(name, param.data)
