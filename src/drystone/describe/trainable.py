"""Can Drystone's own runtime train a model as what it is? If not, what stands in the way?

A model may be planned and estimated without being trained. Nothing is approximated: what the
runtime's own transformer (`run/train/models/transformer.py`) does not do is refused here, with the
reason.
"""

from __future__ import annotations

from collections.abc import Mapping
from pathlib import Path
from types import MappingProxyType
from typing import Final

from drystone.describe.families.function import COMPARED
from drystone.describe.model import Block, Experts, Head, Mlp, ModelSpec, Side
from drystone.errors import InvalidSpec

ACTIVATIONS: Final = frozenset(
    {"gelu", "gelu_new", "gelu_pytorch_tanh", "gelu_fast", "relu", "relu2", "silu"}
)
_PARTIAL_ROTARY: Final = "no rotary positions on a part of each head"
# What families do and shapes do not show.
_OF_FAMILY: Final[Mapping[str, str]] = MappingProxyType(
    {
        "bloom": "no ALiBi",
        "gemma3": "no model that sees; its text part alone has the model_type gemma3_text",
        "gpt_neo": "no attention without a scale",
        "gpt_neox": _PARTIAL_ROTARY,
        "gptj": _PARTIAL_ROTARY,
        "mpt": "no ALiBi",
        "phi": _PARTIAL_ROTARY,
        "stablelm": _PARTIAL_ROTARY,
    }
)


def check_trainable(spec: ModelSpec) -> list[str]:
    """Why the runtime cannot train this model as what it is; empty when it can."""
    problems = [f"no {what}" for what in check_buildable(spec)]
    if spec.family and spec.family not in COMPARED and not problems:
        other = f"{spec.family} models have not been compared with those of transformers"
        problems.append(_OF_FAMILY.get(spec.family, other))
    problems += spec.not_done
    return [*problems, spec.weights_problem] if spec.weights and spec.weights_problem else problems


def refuse_untrainable(spec: ModelSpec) -> None:
    """Raise, with the reasons and the ways out, unless the runtime can train this model."""
    problems = check_trainable(spec)
    if not problems:
        return
    script = "train it with a script of your own (`command` in docs/jobs.md)"
    hint = f"It can be planned and estimated; {script}"
    if spec.not_done:
        hint += ", or take what is not meant out of a copy of its config.json"
    if spec.weights:
        hint += ". To train it anew, without its weights, write from: scratch, or name "
        hint += f"{Path(spec.source)} itself"
    raise InvalidSpec(_message(spec, problems), hint=hint)


def check_buildable(spec: ModelSpec) -> list[str]:
    """What the shape asks for and the transformer lacks; empty when all is there."""
    problems = []
    if spec.head is not Head.LANGUAGE or spec.vision is not None or spec.token_types:
        problems.append("head but a language model's")
    if spec.embedding_size not in (0, spec.hidden_size):
        problems.append("embedding narrower than the model")
    if spec.other_params:
        problems.append("parts of no known kind")
    for block in spec.blocks:
        problems += _check_block(block)
    return list(dict.fromkeys(problems))


def _check_block(block: Block) -> list[str]:
    attention = block.attention
    lacks = {
        "cross-attention or encoder": block.cross_attention is not None
        or block.side is not Side.DECODER,
        "latent attention": attention.is_latent,
        "layers that keep a state (Mamba, linear attention)": attention.recurrence is not None,
        "gate on the output of attention": attention.has_output_gate,
        "layer without a feed-forward network": isinstance(block.feed_forward, Mlp)
        and not block.feed_forward.ffn_size,
        "attention sinks": attention.has_sinks,
        "attention that sees the future": not attention.causal,
        f"block with {block.num_norms} norms": block.num_norms not in (1, 2, 4),
        "sequential block with one norm": block.num_norms == 1 and not block.parallel_residual,
        "odd head size": attention.head_dim % 2 == 1,
    }
    activation = block.feed_forward.activation
    lacks[f"activation {activation}"] = activation not in ACTIVATIONS
    if isinstance(block.feed_forward, Experts):
        lacks |= _check_experts(block.feed_forward)
    return [what for what, is_lacking in lacks.items() if is_lacking]


def _check_experts(experts: Experts) -> dict[str, bool]:
    return {
        "shared experts": experts.shared_ffn_size > 0,
        "groups of experts": experts.num_groups > 1,
        "bias of a router or of experts": experts.router_bias or experts.bias,
        "experts narrower than the model": experts.latent_size > 0,
    }


def _message(spec: ModelSpec, problems: list[str]) -> str:
    return f"{spec.name} cannot be trained as what it is by the runtime's own transformer: " + (
        "; ".join(problems)
    )
