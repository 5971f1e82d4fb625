"""Time of a mixture of experts: routed tokens, the fullest rank, dispatch and what its host does.

Theory of operation. Each token is copied to `top_k` experts, which lie on `ep` ranks; those are
neighbours, `etp` apart, so a group that fits into a node (or an NVLink domain of 72) never touches
the network. A plain all-to-all sends every copy on its own: those for ranks of the same node over
the link inside, the others over the rank's own card. Fused dispatchers (DeepEP, HybridEP) send a
token to each node once, where the link inside spreads it, and to each rank once. Both links work
at the same time, so the slower one counts. A layer waits for its fullest rank: the load of experts
spreads around the mean, that of a rank with several experts less, and of many ranks the fullest
lies about sqrt(2 ln ranks) spreads above the mean. The host of a dropless layer must know how many
tokens each expert got before it can go on, so it runs little ahead; graphs take its work away.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import TYPE_CHECKING

import numpy as np
import numpy.typing as npt

from drystone.describe.recipe import CudaGraphs, ExpertDispatch, Recipe
from drystone.estimate.launchers import LauncherEfficiency
from drystone.estimate.time.compute import PADDING_TOKENS
from drystone.estimate.time.network import alltoall_seconds, make_group

if TYPE_CHECKING:
    from drystone.estimate.time.step import Prepared, StepSplit

FloatArray = npt.NDArray[np.float64]


@dataclass(frozen=True, slots=True)
class ExpertHabits:
    """How a launcher runs experts under a recipe, after `auto` is resolved."""

    fused: bool  # tokens are sent once to each node and rank
    hidden_share: float  # of the dispatch that other compute hides
    host_seconds: float  # to route, dispatch and combine in one layer and direction
    layer_host_share: float  # of the host's work on all layers that graphs leave
    row_share: float  # of the passes over a routed row that fusing them leaves


def expert_habits(recipe: Recipe, launcher: LauncherEfficiency) -> ExpertHabits:
    """What the recipe says, and what the launcher does where it says `auto`."""
    dispatch = recipe.expert_dispatch
    if dispatch is ExpertDispatch.AUTO:
        dispatch = ExpertDispatch(launcher.expert_dispatch)
    graphs = recipe.cuda_graphs
    if graphs is CudaGraphs.AUTO:
        graphs = CudaGraphs(launcher.cuda_graphs)
    fused = dispatch is ExpertDispatch.FUSED
    host = launcher.fused_host_seconds if fused else launcher.dispatch_host_seconds
    whole = graphs is CudaGraphs.FULL
    return ExpertHabits(
        fused=fused,
        hidden_share=launcher.expert_hidden_share if recipe.overlap_dispatch else 0.0,
        host_seconds=0.0 if whole else host,
        layer_host_share=0.0 if whole else 1.0,
        row_share=launcher.fused_row_share if whole else 1.0,
    )


def routed_tokens(prepared: Prepared, split: StepSplit) -> FloatArray:
    """Rows that the experts of the fullest rank multiply, with the padding of each expert."""
    work = prepared.work
    rows = split.tokens * split.routed_share * work.top_k * split.fullest
    return rows + PADDING_TOKENS * work.num_experts / split.ep


def dispatch_seconds(prepared: Prepared, split: StepSplit) -> FloatArray:
    """Tokens to their experts and back, of one micro-batch in all layers of a stage."""
    work, habits = prepared.work, prepared.experts
    if not work.num_moe_layers or (split.ep == 1.0).all():
        return np.zeros_like(split.tokens)
    group = make_group(split.ep, split.etp, prepared.machine)
    row_bytes = split.tokens * split.routed_share * (work.routed_width * work.element_bytes)
    once = alltoall_seconds(
        row_bytes,
        group,
        prepared.machine,
        num_copies=work.top_k,
        fused=habits.fused,
        share_of_nodes=work.group_share,
    )
    layers = split.layer_share * work.num_moe_layers
    passes = 2.0 + work.recompute_share
    shown = 1.0 - habits.hidden_share
    seconds: FloatArray = layers * (2.0 * passes * shown) * once * split.fullest
    return seconds
