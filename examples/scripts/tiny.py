"""A small model and made-up data, which the examples in this folder share."""

from __future__ import annotations

import torch

NUM_LETTERS, LENGTH, NUM_SAMPLES = 32, 16, 4096


class Letters(torch.utils.data.Dataset[dict[str, torch.Tensor]]):
    """Sequences that count upwards from a letter: the next one can be learned."""

    def __len__(self) -> int:
        return NUM_SAMPLES

    def __getitem__(self, sample: int) -> dict[str, torch.Tensor]:
        tokens = (torch.arange(LENGTH) + sample * 7) % NUM_LETTERS
        return {"input_ids": tokens, "labels": tokens}


def build_model() -> torch.nn.Module:
    """A Llama of `transformers`, of 30,000 parameters."""
    from transformers import LlamaConfig, LlamaForCausalLM

    torch.manual_seed(0)  # the same weights on every rank
    return LlamaForCausalLM(
        LlamaConfig(
            vocab_size=NUM_LETTERS,
            hidden_size=32,
            intermediate_size=64,
            num_hidden_layers=2,
            num_attention_heads=2,
            num_key_value_heads=2,
            max_position_embeddings=LENGTH,
            use_cache=False,
        )
    )
