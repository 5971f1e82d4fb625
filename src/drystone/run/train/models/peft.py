"""Adapters as PEFT stores them: names, shapes and configuration.

Where `transformers` keeps several of our matrices in one (Phi-3, GPT-2), PEFT has one adapter for
it: ours stand in it side by side, each with its own rank, so its rank is the sum of theirs.
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from typing import Any

import torch

from drystone.describe.families.names import Stored
from drystone.describe.model import ModelSpec
from drystone.describe.recipe import Lora

_BEFORE = "base_model.model."


def adapter_tensors(
    weights: Mapping[str, Stored], values: Mapping[str, torch.Tensor]
) -> dict[str, torch.Tensor]:
    """The tensors of `adapter_model.safetensors`."""
    found = {}
    for module, stored, parts in _adapted(weights, values):
        inner = [values[f"{part}.lora_a"] for part in parts]
        found[f"{_BEFORE}{module}.lora_A.weight"] = torch.cat(inner)
        rank = sum(len(one) for one in inner)
        outer = torch.zeros(sum(shape[0] for _, shape in stored.parts), rank)
        column = 0
        for part in parts:
            one, row = values[f"{part}.lora_b"], stored.find(f"{part}.weight")
            outer[row : row + len(one), column : column + one.shape[1]] = one
            column += one.shape[1]
        found[f"{_BEFORE}{module}.lora_B.weight"] = outer
    return found


def adapter_config(
    weights: Mapping[str, Stored], values: Mapping[str, torch.Tensor], model: ModelSpec, lora: Lora
) -> dict[str, Any]:
    """The object of `adapter_config.json`."""
    ranks = {
        _last_names(module): len(parts) * lora.rank
        for module, _, parts in _adapted(weights, values)
    }
    others = {module: rank for module, rank in ranks.items() if rank != lora.rank}
    return {
        "peft_type": "LORA",
        "task_type": "CAUSAL_LM",
        "base_model_name_or_path": model.weights or model.name,
        "r": lora.rank,
        "lora_alpha": lora.scale * lora.rank,
        "rank_pattern": others,
        "alpha_pattern": {module: lora.scale * rank for module, rank in others.items()},
        "lora_dropout": lora.dropout,
        "target_modules": sorted(ranks),
        "fan_in_fan_out": any(stored.is_transposed for stored in weights.values()),
        "bias": "none",
        "inference_mode": True,
    }


def _adapted(
    weights: Mapping[str, Stored], values: Mapping[str, torch.Tensor]
) -> Iterator[tuple[str, Stored, list[str]]]:
    """Modules of `transformers` with an adapter, and which of ours they hold have one."""
    for name, stored in weights.items():
        parts = [part.removesuffix(".weight") for part, _ in stored.parts]
        adapted = [part for part in parts if f"{part}.lora_a" in values]
        if adapted and name.endswith(".weight"):
            yield name.removesuffix(".weight"), stored, adapted


def _last_names(module: str) -> str:
    """`self_attn.q_proj`: the same in every layer, and no other module's."""
    return ".".join(module.split(".")[-2:])
