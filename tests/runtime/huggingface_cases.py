"""Hugging Face models, a few layers wide enough to be real, for the engine's tests."""

import random

import torch

from drystone.run.train.data import RankWork, micro_batches
from drystone.run.train.models.layered import NamedBlocks
from drystone.run.train.uneven.engine import Engine

VOCAB, SEQ_LEN = 53, 10
BLOCKS = {"gpt2": "transformer.h", "llama": "model.layers", "qwen3": "model.layers"}


def a_huggingface_model(kind: str) -> torch.nn.Module:
    import transformers

    torch.manual_seed(4)
    if kind == "gpt2":
        return transformers.GPT2LMHeadModel(
            transformers.GPT2Config(
                vocab_size=VOCAB, n_positions=SEQ_LEN, n_embd=16, n_layer=3, n_head=2,
                resid_pdrop=0.0, embd_pdrop=0.0, attn_pdrop=0.0,
            )
        )  # fmt: skip
    sizes = {
        "vocab_size": VOCAB, "hidden_size": 16, "intermediate_size": 24, "num_hidden_layers": 3,
        "num_attention_heads": 4, "num_key_value_heads": 2, "head_dim": 4,
    }  # fmt: skip
    if kind == "llama":
        return transformers.LlamaForCausalLM(transformers.LlamaConfig(**sizes))
    return transformers.Qwen3ForCausalLM(
        transformers.Qwen3Config(**sizes, tie_word_embeddings=True)
    )


def read(samples) -> dict[str, torch.Tensor]:
    rows = [
        [random.Random(one * 97 + at).randrange(VOCAB) for at in range(SEQ_LEN)] for one in samples
    ]
    ids = torch.tensor(rows).reshape(-1, SEQ_LEN)
    return {"input_ids": ids, "labels": ids}


def plain_gradients(kind: str, num_samples: int) -> tuple[float, dict[str, torch.Tensor]]:
    model = a_huggingface_model(kind)
    loss = model(**read(range(num_samples))).loss
    loss.backward()
    return loss.item(), {name: one.grad for name, one in model.named_parameters()}


def uneven_gradients(kind: str, works: list[RankWork]) -> tuple[float, list[tuple]]:
    engine = Engine(
        NamedBlocks(a_huggingface_model(kind), BLOCKS[kind]), [work.state_share for work in works]
    )
    runs = micro_batches(works, engine.wire.rank, 0)
    result = engine.compute_gradients([read(run) for run in runs])
    return result.loss, [(one.name, one.start, one.end, one.value.grad) for one in engine.owned]


def uneven_gradients_of_all(works: list[RankWork]) -> dict[str, tuple[float, list[tuple]]]:
    return {kind: uneven_gradients(kind, works) for kind in BLOCKS}
