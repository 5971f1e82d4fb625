"""Low-rank adapters: what is trained is small, what is frozen is only sharded.

Beside a frozen matrix W stand two thin ones, and the layer computes `W x + s B A x` (LoRA,
arXiv:2106.09685). A begins at random, B at 0, so that training begins at the model as it is. What
the adapter adds is scaled by alpha / rank, which is 1 where no alpha is given.

The matrix keeps its name: `blocks.0.attention.query.weight` has `lora_a` and `lora_b` as
neighbours. The engine holds frozen parameters in the compute dtype, reduces no gradient for them
and keeps no optimizer state.
"""

from __future__ import annotations

from typing import Any, Final

import torch
from torch import nn
from torch.nn import functional as F  # noqa: N812  # torch's own custom

from drystone.describe.recipe import Lora
from drystone.errors import InvalidSpec
from drystone.run.train.models.layered import LayeredModel, seeded_normal
from drystone.run.train.models.quantised import QuantisedLinear, quantise

# Names of the last module on the way, in the reference transformer and in `transformers`, by the
# projections that the module computes.
_MODULES: Final = {
    ("q",): ("query", "q_proj"),
    ("k",): ("key", "k_proj"),
    ("v",): ("value", "v_proj"),
    ("o",): ("out", "o_proj", "out_proj"),
    ("gate",): ("gate", "gate_proj"),
    ("up",): ("up", "up_proj", "c_fc", "fc1"),
    ("down",): ("down", "down_proj", "fc2"),
    ("q", "k", "v"): ("qkv_proj", "query_key_value", "c_attn"),
    ("gate", "up"): ("gate_up_proj",),
}
_TARGETS: Final[dict[str, tuple[str, ...]]] = {
    name: projections for projections, names in _MODULES.items() for name in names
}
_ROUTER: Final = "router"  # of a mixture of experts: small, and what it says decides for all of it
_BY_PARENT: Final = {("attn", "c_proj"): ("o",), ("mlp", "c_proj"): ("down",)}


class LoraLinear(nn.Linear):
    """A frozen linear layer with an adapter beside it."""

    lora_a: nn.Parameter  # (rank, inputs)
    lora_b: nn.Parameter  # (outputs, rank)
    lora_dropout: float
    lora_scale: float

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        """Both, summed."""
        return F.linear(x, self.weight, self.bias) + _adapted(self, x)


class LoraQuantisedLinear(QuantisedLinear):
    """A frozen linear layer in four bits with an adapter beside it."""

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        """Both, summed."""
        return super().forward(x) + _adapted(self, x)


def add_adapters(
    model: LayeredModel, lora: Lora, *, seed: int = 0, is_quantised: bool = False
) -> list[str]:
    """Freeze the model and put adapters beside the matrices of its blocks; says beside which.

    Quantised: all matrices of the blocks, with adapters or without, are kept in four bits; norms,
    biases, routers, embeddings and head are not.
    """
    for parameter in model.module.parameters():
        parameter.requires_grad_(False)
    names = {id(one): name for name, one in model.module.named_modules()}
    found = []
    for block in model.blocks:
        for module in list(block.modules()):
            name = names[id(module)]
            if is_quantised and type(module) is nn.Linear and not name.endswith(_ROUTER):
                quantise(module)
            if set(_targets_of(name)) & set(lora.targets):
                _adapt(module, name, lora, seed)
                found.append(name)
    if not found:
        raise InvalidSpec(
            f"{type(model.module).__name__} has no matrix for adapters at {', '.join(lora.targets)}"
        )
    if lora.train_embeddings:
        for parameter in (*model.front, *model.back):
            if parameter.dim() > 1:
                parameter.requires_grad_(True)
    return found


def merged_weight(
    weight: torch.Tensor, lora_a: torch.Tensor, lora_b: torch.Tensor, scale: float = 1.0
) -> torch.Tensor:
    """The matrix that does what the frozen one and its adapter do together."""
    return weight + (lora_b @ lora_a) * scale


def _targets_of(name: str) -> tuple[str, ...]:
    parent, last = name.split(".")[-2:] if "." in name else ("", name)
    return _BY_PARENT.get((parent, last)) or _TARGETS.get(last, ())


def _adapt(module: nn.Module, name: str, lora: Lora, seed: int) -> None:
    """Turn a linear layer into one with an adapter, in its place."""
    if type(module) in (nn.Linear, QuantisedLinear):
        is_whole = type(module) is nn.Linear
        module.__class__ = LoraLinear if is_whole else LoraQuantisedLinear
        outputs, inputs = module.out_features, module.in_features
    elif type(module).__name__ == "Conv1D":  # of GPT-2 in `transformers`: weights the other way
        module.__class__ = _with_adapter(type(module))
        inputs, outputs = module.weight.shape
    else:
        raise InvalidSpec(f"{name}: no adapter for a {type(module).__name__}")
    device = next(module.parameters()).device
    first = torch.empty(lora.rank, inputs, device=device)
    if not first.is_meta:
        first = seeded_normal(first.shape, inputs**-0.5, seed, f"{name}.lora_a").to(device)
    module.lora_a = nn.Parameter(first)
    module.lora_b = nn.Parameter(torch.zeros(outputs, lora.rank, device=device))
    module.lora_dropout, module.lora_scale = lora.dropout, lora.scale


def _with_adapter(kind: type[nn.Module]) -> type[nn.Module]:
    def forward(self: nn.Module, x: torch.Tensor) -> Any:
        return kind.forward(self, x) + _adapted(self, x)

    return type(f"Lora{kind.__name__}", (kind,), {"forward": forward})


def _adapted(module: Any, x: torch.Tensor) -> torch.Tensor:
    x = F.dropout(x, module.lora_dropout, module.training)
    added = F.linear(F.linear(x, module.lora_a), module.lora_b)
    return added if module.lora_scale == 1.0 else added * module.lora_scale
