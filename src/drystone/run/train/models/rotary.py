"""Rotary positions (arXiv:2104.09864): tables of cosines and sines, plain and scaled."""

from __future__ import annotations

import math
from collections.abc import Mapping

import torch

from drystone.describe.model import ModelSpec, RopeScaling

Table = tuple[torch.Tensor, torch.Tensor]  # cosines and sines, (positions, channels)
Rotary = Mapping[float, Table]  # by the base that an attention has of its own; empty: none


def rotary_tables(spec: ModelSpec, length: int, like: torch.Tensor) -> Rotary:
    """The tables that the layers of a model need, in the dtype of `like`."""
    head_dim = spec.blocks[0].attention.head_dim
    channels = int(head_dim * spec.rotary_share)
    return {
        own: _table(spec, own, channels, length, like)
        for own in sorted({block.attention.rope_theta for block in spec.blocks})
    }


def rotate(x: torch.Tensor, table: Table) -> torch.Tensor:
    """Turn the two halves of each head, or of its first channels, against each other."""
    cosine, sine = table
    turned, rest = x, None
    if cosine.shape[-1] < x.shape[-1]:
        turned, rest = x[..., : cosine.shape[-1]], x[..., cosine.shape[-1] :]
    first, second = turned.chunk(2, dim=-1)
    turned = turned * cosine + torch.cat((-second, first), dim=-1) * sine
    return turned if rest is None else torch.cat((turned, rest), dim=-1)


def _table(spec: ModelSpec, own: float, channels: int, length: int, like: torch.Tensor) -> Table:
    steps = torch.arange(0, channels, 2, dtype=torch.float32, device=like.device) / channels
    frequencies = 1.0 / (own or spec.rope_theta) ** steps
    scale = 1.0
    if spec.rope_scaling is not None and not own:
        frequencies = _scaled(frequencies, spec.rope_scaling, length)
        scale = spec.rope_scaling.table_scale
    at = torch.arange(length, dtype=torch.float32, device=like.device)
    angles = torch.outer(at, frequencies).repeat(1, 2)
    return (angles.cos() * scale).to(like.dtype), (angles.sin() * scale).to(like.dtype)


def _scaled(frequencies: torch.Tensor, scaling: RopeScaling, length: int) -> torch.Tensor:
    match scaling.kind:
        case "linear":
            return frequencies / scaling.factor
        case "longrope":  # arXiv:2402.13753
            is_long = length > scaling.original_context
            factors = scaling.long_factors if is_long else scaling.short_factors
            return frequencies / torch.tensor(factors, device=frequencies.device)
        case "llama3":  # long waves by the factor, short ones not at all, others in between
            low, high = scaling.low_frequency_factor, scaling.high_frequency_factor
            waves = scaling.original_context * frequencies / (2 * math.pi)  # in the context
            left = ((waves - low) / (high - low)).clamp(0.0, 1.0)
            return frequencies * (left + (1.0 - left) / scaling.factor)
    raise ValueError(scaling.kind)
