"""What does a rank of the uneven engine hold, and when does it hold most?

The engine passes all micro-batches through a layer before it gathers the next (Cephalo,
arXiv:2411.01075), so its moments are others than those of `peak.py`. A layer here is a block, or
what stands before or after the blocks; where these share weights they are one. With c bytes of an
element in compute, 4 of a gradient, N a block, F what is before, K what is behind, s the rank's
share of the state:

    loss    the last block waits for its backward, the one before it is on its way; the head is
            there with its gradient, and the logits three times in fp32
    first   the last block's backward: two blocks, one gradient, that of the head being reduced
    middle  a block's backward: two blocks, two gradients (one is being reduced)
    last    the first block's backward: what is before is on its way; all other pieces of gradients
            are there
    front   the embedding's backward: its gradient in both widths
    step    all pieces of gradients, and the optimizer's temporaries

Shared embeddings keep their gradient from the loss to the end. What enters layers is in host
memory. `tests/oracles/fake_ranks.py` asks the engine itself; `benchmarks/runtime_memory.py`
compares.
"""

from __future__ import annotations

from dataclasses import dataclass, replace

import numpy as np
import numpy.typing as npt

from drystone.describe.layout import Layouts, Sharding
from drystone.describe.model import ModelSpec
from drystone.describe.recipe import Offload, Recipe, Recompute, RecomputeKind, Tuning
from drystone.estimate.memory.peak import stage_memory
from drystone.estimate.memory.terms import LayerTerms, MemoryTerms, memory_terms

FloatArray = npt.NDArray[np.float64]

_GRADIENT_BYTES = 4.0  # of a whole layer, and of a piece: added and reduced in fp32
# The loss in fp32 over 16-bit logits: log-probabilities, their gradient and that of the logits
# stand beside each other in torch's own cross-entropy.
_LOGITS_BYTES = 12.0
_MIN_LOGITS_BYTES = 2.0  # what is left of them when the head's own gradient is computed


@dataclass(frozen=True, slots=True, kw_only=True, eq=False)
class LayerMajorMoment:
    """Bytes that come and go: apart from state, and for each unit of a rank's share of the state.

    Arrays have one entry for each micro-batch asked for; 0 means that nothing is computed.
    """

    gathered: float
    gradients: float  # of whole layers
    activations: FloatArray
    logits: FloatArray
    per_share: float  # pieces of gradients that are there, pieces on their way

    @property
    def apart(self) -> FloatArray:
        """What does not depend on the share."""
        return self.gathered + self.gradients + self.activations + self.logits


@dataclass(frozen=True, slots=True, kw_only=True, eq=False)
class LayerMajorMemory:
    """One model under one recipe, for micro-batches of several sizes."""

    state_per_share: float  # weights and optimizer state of the whole model
    moments: dict[str, LayerMajorMoment]

    def peak_bytes(self, state_share: float) -> FloatArray:
        """What tensors hold at most, for each micro-batch, on a rank with that share."""
        highest = [
            moment.apart + state_share * moment.per_share for moment in self.moments.values()
        ]
        return np.asarray(state_share * self.state_per_share + np.max(highest, axis=0))

    def apart_bytes(self) -> FloatArray:
        """The largest of what does not depend on the share."""
        return np.asarray(np.max([moment.apart for moment in self.moments.values()], axis=0))


def layer_major_recipe(recipe: Recipe) -> Recipe:
    """As the layer-major order runs it: every layer computed again, its input in host memory."""
    return replace(
        recipe, recompute=Recompute(kind=RecomputeKind.FULL), offload=Offload.ACTIVATIONS
    )


def layer_major_memory(
    model: ModelSpec, recipe: Recipe, *, num_ranks: int, most_micro_batch: int
) -> LayerMajorMemory:
    """For micro-batches of 0 to `most_micro_batch` sequences."""
    terms = memory_terms(model, layer_major_recipe(recipe))
    layouts = Layouts.build(
        dp=num_ranks,
        micro_batch=np.arange(1, max(most_micro_batch, 1) + 1),
        sharding=int(Sharding.ZERO3),
    )
    first = np.zeros((1, 1), dtype=np.int64)
    of_stage = stage_memory(terms, layouts, first, None).moments
    rebuilt = _with_idle(of_stage.backward.activations, most_micro_batch)
    entering = _with_idle(of_stage.loss.activations, most_micro_batch)
    tokens = np.arange(most_micro_batch + 1, dtype=np.float64) * recipe.seq_len
    sizes = _Sizes.of(terms, model, is_shared=num_ranks > 1)
    state = terms.state
    return LayerMajorMemory(
        state_per_share=sizes.trained * (state.weights + state.master + state.moments)
        + sizes.frozen_bytes,
        moments=_moments(terms, sizes, model.vocab_size * tokens, rebuilt, entering),
    )


@dataclass(frozen=True, slots=True, kw_only=True)
class _Sizes:
    """Parameters of layers: all of them, and those that are trained."""

    copy_bytes: float
    block_bytes: float  # as it is gathered: quantised matrices stay so
    unpacked_bytes: float  # of the matrix that multiplies, where matrices are quantised
    block_trained: float
    front: float
    front_trained: float
    back: float
    back_trained: float
    trained: float
    frozen_bytes: float
    is_tied: bool
    is_shared: bool  # with one rank nothing is sent

    @classmethod
    def of(cls, terms: MemoryTerms, model: ModelSpec, *, is_shared: bool) -> _Sizes:
        counts = terms.counts[-1]
        numbered = list(zip(counts.tolist(), terms.layers, strict=True))
        blocks = float(sum(number * layer.parameters.total for number, layer in numbered))
        is_packed = terms.recipe.tuning is Tuning.QLORA
        packed = float(sum(number * _packed(layer, terms) for number, layer in numbered))
        saved = terms.frozen_bytes - terms.layer_copy_bytes if is_packed else 0.0
        frozen = blocks if terms.is_frozen else 0.0
        adapters = float(sum(number * layer.adapter for number, layer in numbered))
        front, back = terms.embedding + terms.positions, terms.head + terms.final_norms
        is_tied = terms.tied_head > 0
        if is_tied:
            front = back = front + back
        around = front if is_tied else front + back
        around_is_trained = not terms.is_frozen or terms.recipe.lora.train_embeddings
        trained = adapters if terms.is_frozen else blocks
        return cls(
            copy_bytes=terms.copy_bytes,
            block_bytes=max(
                terms.copy_bytes * (layer.parameters.total + layer.adapter - _packed(layer, terms))
                + terms.layer_copy_bytes * _packed(layer, terms)
                for layer in terms.layers
            ),
            unpacked_bytes=is_packed * terms.copy_bytes * _largest_matrix(model),
            block_trained=max(
                layer.adapter if terms.is_frozen else float(layer.parameters.total)
                for layer in terms.layers
            ),
            front=front,
            front_trained=front if around_is_trained else 0.0,
            back=back,
            back_trained=back if around_is_trained else 0.0,
            trained=trained + (around if around_is_trained else 0.0),
            frozen_bytes=terms.frozen_bytes * (frozen + (0.0 if around_is_trained else around))
            - saved * packed,
            is_tied=is_tied,
            is_shared=is_shared,
        )


def _packed(layer: LayerTerms, terms: MemoryTerms) -> float:
    """Parameters of a layer that are kept in few bits."""
    is_packed = terms.recipe.tuning is Tuning.QLORA
    return layer.parameters.total - layer.unquantised if is_packed else 0.0


def _largest_matrix(model: ModelSpec) -> int:
    """Elements of the largest matrix of any block."""
    return model.hidden_size * max(
        max(block.attention.num_heads * block.attention.head_dim, block.feed_forward.ffn_size)
        for block in model.blocks
    )


def _with_idle(values: FloatArray, most_micro_batch: int) -> FloatArray:
    """One entry more in front: nothing for a micro-batch of 0."""
    return np.concatenate([[0.0], np.broadcast_to(values[0], (max(most_micro_batch, 1),))])[
        : most_micro_batch + 1
    ]


def _moments(
    terms: MemoryTerms,
    sizes: _Sizes,
    logits: FloatArray,
    rebuilt: FloatArray,
    entering: FloatArray,
) -> dict[str, LayerMajorMoment]:
    c, g = sizes.copy_bytes, _GRADIENT_BYTES
    none = np.zeros_like(rebuilt)
    # A trained piece is cast for its gather and stays until that ends; in fp32 it is sent itself.
    sent = c if sizes.is_shared and c < terms.state.weights else 0.0
    held = g * sizes.back_trained if sizes.is_tied else 0.0  # until the embedding's backward
    head_gradient = c * sizes.back_trained * (logits > 0)
    pieces = g * sizes.trained
    late = g * (sizes.trained - sizes.front_trained)
    found = {
        "loss": LayerMajorMoment(
            gathered=2 * sizes.block_bytes + c * sizes.back,
            gradients=g * sizes.back_trained,
            activations=3 * entering,
            logits=np.maximum(_LOGITS_BYTES * logits, _MIN_LOGITS_BYTES * logits + head_gradient),
            per_share=sent * sizes.block_trained,
        ),
        "first": LayerMajorMoment(
            gathered=2 * sizes.block_bytes + sizes.unpacked_bytes,
            gradients=g * (sizes.block_trained + sizes.back_trained),
            activations=rebuilt + 2 * entering,
            logits=none,
            per_share=sent * sizes.block_trained + (0.0 if held else g * sizes.back_trained),
        ),
        "middle": LayerMajorMoment(
            gathered=2 * sizes.block_bytes + sizes.unpacked_bytes,
            gradients=2 * g * sizes.block_trained + held,
            activations=rebuilt + 2 * entering,
            logits=none,
            per_share=sent * sizes.block_trained + late - 2 * g * sizes.block_trained,
        ),
        "last": LayerMajorMoment(
            gathered=sizes.block_bytes
            + sizes.unpacked_bytes
            + (c * sizes.front if sizes.front_trained else 0.0),
            gradients=2 * g * sizes.block_trained + held,
            activations=rebuilt + 2 * entering,
            logits=none,
            per_share=sent * sizes.front_trained + late - g * sizes.block_trained,
        ),
        "front": LayerMajorMoment(
            gathered=c * sizes.front if sizes.front_trained else 0.0,
            gradients=g * (sizes.front_trained + sizes.block_trained),
            activations=2 * entering + c * sizes.front_trained * (logits > 0),
            logits=none,
            per_share=late,
        ),
        "reduced": LayerMajorMoment(
            gathered=0.0,
            gradients=g * (sizes.front_trained or sizes.block_trained),
            activations=none,
            logits=none,
            per_share=pieces,
        ),
    }
    found["step"] = replace(
        found["reduced"], gradients=0.0, per_share=pieces + sizes.trained * terms.state.step
    )
    return found
