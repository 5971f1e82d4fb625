"""What the ranks of the adapters' tests do, and the plain training that they must equal."""

from dataclasses import dataclass

import torch
from engine_cases import SEQ_LEN, VOCAB, Case, a_spec, an_optimizer, tokens
from torch import nn

from drystone.describe.recipe import Lora
from drystone.run.train.data import micro_batches
from drystone.run.train.models.layered import LayeredModel, NamedBlocks
from drystone.run.train.models.lora import add_adapters
from drystone.run.train.models.transformer import build_model
from drystone.run.train.uneven.engine import Engine


@dataclass(frozen=True)
class LoraCase(Case):
    """One split of one job with adapters."""

    targets: tuple[str, ...] = ("q", "v", "o", "up", "down")
    trains_embeddings: bool = False


class Labelled(nn.Module):
    """A model of `transformers` that takes a tensor of tokens, and predicts all but the first."""

    def __init__(self, inner: nn.Module) -> None:
        super().__init__()
        self.inner = inner

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return self.inner(input_ids=x, labels=x).loss


def a_huggingface_model(case: LoraCase) -> LayeredModel:
    import transformers

    torch.manual_seed(5)
    if case.style == "gpt2-hf":
        config = transformers.GPT2Config(
            vocab_size=VOCAB, n_embd=16, n_layer=2, n_head=2, n_positions=SEQ_LEN + 1,
            resid_pdrop=0.0, embd_pdrop=0.0, attn_pdrop=0.0, tie_word_embeddings=case.tied,
        )  # fmt: skip
        model, blocks = transformers.GPT2LMHeadModel(config), "inner.transformer.h"
    else:
        config = transformers.LlamaConfig(
            vocab_size=VOCAB, hidden_size=16, intermediate_size=24, num_hidden_layers=2,
            num_attention_heads=4, num_key_value_heads=2, tie_word_embeddings=case.tied,
        )  # fmt: skip
        model, blocks = transformers.LlamaForCausalLM(config), "inner.model.layers"
    return NamedBlocks(Labelled(model), blocks)


def a_model(case: LoraCase) -> LayeredModel:
    if case.style.endswith("-hf"):
        model = a_huggingface_model(case)
    else:
        model = build_model(a_spec(case.style, tied=case.tied, num_layers=2), seed=5)
    lora = Lora(rank=3, targets=case.targets, train_embeddings=case.trains_embeddings)
    add_adapters(model, lora, seed=1)
    for name, one in model.module.named_parameters():
        if name.endswith("lora_b"):  # otherwise the other adapter has no gradient at first
            chance = torch.Generator().manual_seed(len(name))
            nn.init.normal_(one, std=0.1, generator=chance)
    return model


def train_plainly(case: LoraCase) -> list[tuple]:
    """Loss, gradient norm and gradients of what is trained, of every step, on one device."""
    module = a_model(case).module
    trained = {name: one for name, one in module.named_parameters() if one.requires_grad}
    optimizer = an_optimizer([{"params": list(trained.values()), "weight_decay": 0.1}])
    results, batch = [], sum(case.batches)
    for step in range(case.steps):
        loss = module(tokens().read(range(step * batch, (step + 1) * batch)))
        loss.backward()
        gradients = {name: one.grad.clone() for name, one in trained.items()}
        norm = nn.utils.clip_grad_norm_(trained.values(), case.clip or float("inf"))
        results.append((loss.item(), norm.item(), gradients))
        optimizer.step()
        optimizer.zero_grad()
    return results


def train_unevenly(cases: list[LoraCase]) -> list[list[tuple]]:
    """For each case and step: loss, norm, owned gradients as (name, start, end, values)."""
    return [_train_one(case) for case in cases]


def _train_one(case: LoraCase) -> list[tuple]:
    engine = Engine(a_model(case), case.shares)
    optimizer = an_optimizer(engine.parameter_groups(weight_decay=0.1))
    source, results = tokens(), []
    for step in range(case.steps):
        runs = micro_batches(case.works, engine.wire.rank, step * sum(case.batches))
        result = engine.compute_gradients([source.read(run) for run in runs])
        owned = [
            (one.name, one.start, one.end, one.value.grad.clone())
            for one in engine.owned
            if one.value.requires_grad
        ]
        if case.clip:
            engine.clip_gradients(result, case.clip)
        optimizer.step()
        optimizer.zero_grad()
        results.append((result.loss, result.gradient_norm, owned))
    return results
