"""Small modules for the tests of the tracer. Each function is named by what is special about it."""

import torch
from torch import nn
from torch.nn import functional as F  # noqa: N812  # torch's own custom


class Experts(nn.Module):
    """Every expert sees every token: fixed shapes."""

    def __init__(self, size: int, num_experts: int) -> None:
        super().__init__()
        self.router = nn.Linear(size, num_experts)
        self.experts = nn.ModuleList(Mlp(size) for _ in range(num_experts))

    def forward(self, x):
        weights = self.router(x).softmax(-1)
        return sum(weights[..., i : i + 1] * one(x) for i, one in enumerate(self.experts))


class Mlp(nn.Sequential):
    def __init__(self, size: int) -> None:
        super().__init__(nn.Linear(size, 4 * size), nn.GELU(), nn.Linear(4 * size, size))


class Block(nn.Module):
    def __init__(self, size: int, index: int, *, num_experts: int = 0, dropout: float = 0.0):
        super().__init__()
        self.layer_index = index  # differs in every block and must not matter
        self.first_norm, self.second_norm = nn.LayerNorm(size), nn.LayerNorm(size)
        self.qkv, self.out = nn.Linear(size, 3 * size), nn.Linear(size, size)
        self.mlp = Experts(size, num_experts) if num_experts else Mlp(size)
        self.dropout = nn.Dropout(dropout)

    def forward(self, x):
        batch, length, size = x.shape
        qkv = self.qkv(self.first_norm(x)).view(batch, length, 3, 4, size // 4)
        query, key, value = qkv.permute(2, 0, 3, 1, 4)
        seen = F.scaled_dot_product_attention(query, key, value, is_causal=True,
                                              dropout_p=self.dropout.p)  # fmt: skip
        x = x + self.dropout(self.out(seen.transpose(1, 2).reshape(batch, length, size)))
        return x + self.dropout(self.mlp(self.second_norm(x)))


class Gpt(nn.Module):
    def __init__(self, blocks, *, size: int = 128, tied: bool = False) -> None:
        super().__init__()
        self.tokens, self.places = nn.Embedding(1000, size), nn.Embedding(2048, size)
        self.blocks = nn.ModuleList(blocks)
        self.norm, self.head = nn.LayerNorm(size), nn.Linear(size, 1000, bias=False)
        if tied:
            self.head.weight = self.tokens.weight

    def forward(self, tokens):
        x = self.tokens(tokens) + self.places(torch.arange(tokens.shape[1]))
        for block in self.blocks:
            x = block(x)
        return self.head(self.norm(x))


def plain():
    return Gpt(Block(128, i) for i in range(9))


def tied():
    return Gpt((Block(128, i) for i in range(9)), tied=True)


def frozen_below():
    module = Gpt(Block(128, i) for i in range(18))
    for one in (module.tokens, module.places, *module.blocks[:10]):
        one.requires_grad_(False)
    return module


def frozen_but_adapters():
    module = Gpt(Block(128, i) for i in range(10)).requires_grad_(False)
    for block in module.blocks:
        block.out.requires_grad_(True)
    return module


def experts_every_third():
    return Gpt(Block(128, i, num_experts=2 if i % 3 == 2 else 0) for i in range(12))


def dense_then_experts():
    return Gpt(Block(128, i, num_experts=0 if i < 2 else 2) for i in range(7))


def with_dropout():
    return Gpt(Block(128, i, dropout=0.1) for i in range(8))


def mlp():
    layers = [nn.Linear(256, 512), nn.ReLU(), nn.Linear(512, 512), nn.ReLU(), nn.Linear(512, 10)]
    return nn.Sequential(*layers)


def llama():
    from transformers import LlamaConfig, LlamaForCausalLM

    return LlamaForCausalLM(LlamaConfig(hidden_size=128, intermediate_size=344, vocab_size=2000,
                                        num_hidden_layers=7, num_attention_heads=4,
                                        num_key_value_heads=2))  # fmt: skip


def llama_8b():
    from transformers import LlamaConfig, LlamaForCausalLM

    return LlamaForCausalLM(LlamaConfig(hidden_size=4096, intermediate_size=14336,
                                        vocab_size=128256, num_hidden_layers=32,
                                        num_attention_heads=32, num_key_value_heads=8))  # fmt: skip


class Shared(Gpt):
    """One block run many times."""

    def forward(self, tokens):
        x = self.tokens(tokens)
        for _ in range(3):
            for block in self.blocks:
                x = block(x)
        return self.head(x)


def shared():
    return Shared(Block(128, i) for i in range(6))


class ByIndex(Gpt):
    """Asks for blocks by a number that it remembers: cannot be cut short."""

    def forward(self, tokens):
        x = self.tokens(tokens)
        for index in range(6):
            x = self.blocks[index](x)
        return self.head(x)


def by_index():
    return ByIndex(Block(128, i) for i in range(6))


def looks_at_values():
    rates = [rate.item() for rate in torch.linspace(0, 0.1, 6)]
    return Gpt(Block(128, i, dropout=rate) for i, rate in enumerate(rates))
