"""Adapters beside matrices in four bits: our splits, and the loop of `transformers` and PEFT."""

from dataclasses import replace
from pathlib import Path

import torch
from cells_cases import an_engine, an_optimizer
from engine_cases import tokens
from faithful_cases import BATCH, WORKS, FolderCase, layout, their_loss, their_model

from drystone.describe.families.huggingface import load_config
from drystone.describe.families.names import STYLES, stored_weights
from drystone.describe.recipe import Lora
from drystone.run.train.data import micro_batches
from drystone.run.train.models.lora import add_adapters
from drystone.run.train.models.transformer import Transformer, build_model
from drystone.run.train.uneven.engine import Engine
from drystone.run.train.uneven.whole import WholeEngine

LORA = Lora(rank=4, alpha=8.0, targets=("q", "v", "down"))
MODULES = ["q_proj", "v_proj", "down_proj"]


class QloraCase(FolderCase):
    def model(self, *, on_meta: bool) -> Transformer:
        return adapted(Path(self.folder), on_meta=on_meta)


def adapted(folder: Path, *, on_meta: bool = True) -> Transformer:
    model = build_model(load_config(folder), on_meta=on_meta)
    add_adapters(model, LORA, seed=1, is_quantised=True)
    return model


def split_layers(folder: Path) -> QloraCase:
    return QloraCase(**vars_of(layout(folder, tp=1, pp=2)))


def vars_of(case: FolderCase) -> dict:
    return {name: getattr(case, name) for name in case.__dataclass_fields__}


def train_on_two(folder: Path, steps: int) -> list[list[float]]:
    """Losses layer by layer over uneven ranks, with whole weights, and with layers split."""
    shares = [work.state_share for work in WORKS]
    uneven = Engine(adapted(folder), shares)
    whole = WholeEngine(adapted(folder), shares)
    return [
        _train(uneven, steps),
        _train(whole, steps),
        _train(an_engine(split_layers(folder)), steps),
    ]


def train_alone(folder: Path, steps: int) -> list[float]:
    engine = WholeEngine(adapted(folder), [1.0])
    works = [replace(WORKS[0], batch=BATCH, state_share=1.0)]
    return _train(engine, steps, works)


def _train(engine, steps: int, works=WORKS) -> list[float]:
    optimizer = an_optimizer(engine.parameter_groups(weight_decay=0.1))
    losses = []
    for step in range(steps):
        if hasattr(engine, "layout"):
            runs = engine.layout.samples(engine.seat, step * BATCH) if engine.reads_samples else []
        else:
            runs = micro_batches(works, engine.wire.rank, step * BATCH)
        losses.append(engine.compute_gradients([tokens().read(run) for run in runs]).loss)
        optimizer.step()
        optimizer.zero_grad()
    return losses


def train_theirs(name: str, folder: Path, steps: int) -> list[float]:
    """With `transformers`, PEFT and torch alone, from the same first adapters."""
    model = their_adapted(name, folder)
    trained = [one for one in model.parameters() if one.requires_grad]
    optimizer = an_optimizer([{"params": trained, "weight_decay": 0.1}])
    losses = []
    for step in range(steps):
        loss = their_loss(model, tokens().read(range(step * BATCH, (step + 1) * BATCH)))
        loss.backward()
        losses.append(loss.item())
        optimizer.step()
        optimizer.zero_grad()
    return losses


def their_adapted(name: str, folder: Path):
    import peft

    base = their_model(name).train()
    round_linear_layers(base)
    config = peft.LoraConfig(r=LORA.rank, lora_alpha=LORA.alpha, target_modules=MODULES)
    model = peft.get_peft_model(base, config)
    spec = load_config(folder)
    ours = build_model(spec, on_meta=True)
    add_adapters(ours, LORA, seed=1, is_quantised=True)
    for theirs, stored in stored_weights(spec, STYLES[spec.family]).items():
        part = stored.parts[0][0].removesuffix("weight") + "lora_a"
        module = f"base_model.model.{theirs.removesuffix('.weight')}"
        if part in dict(ours.named_parameters()):
            first = model.get_submodule(module).lora_A["default"].weight
            first.data = ours.initial_part(part, first.shape, 0, first.numel()).view(first.shape)
    return model


def round_linear_layers(model: torch.nn.Module) -> None:
    """Every linear layer but the head, as bitsandbytes picks them, to NF4 and back."""
    for name, module in model.named_modules():
        if isinstance(module, torch.nn.Linear) and name != "lm_head":
            module.weight.data = rounded(module.weight.data)


def rounded(weight: torch.Tensor) -> torch.Tensor:
    """The slow way: for each of 64 weights the nearest of 16 numbers times the largest."""
    numbers = normal_floats()
    done = torch.empty(weight.numel(), dtype=torch.float64)
    flat = weight.flatten().double()
    for start in range(0, len(flat), 64):
        block = flat[start : start + 64]
        largest = block.abs().max()
        nearest = (block[:, None] / largest - numbers).abs().argmin(1)
        done[start : start + 64] = numbers[nearest] * largest
    return done.view(weight.shape).to(weight.dtype)


def normal_floats() -> torch.Tensor:
    """From quantiles of the normal distribution, as the paper's authors make them: eight above
    zero, zero, seven below, where the outermost are those of 0.9677083."""
    most = 0.9677083
    above = torch.special.ndtri(torch.linspace(most, 0.5, 9, dtype=torch.float64)[:-1])
    below = -torch.special.ndtri(torch.linspace(most, 0.5, 8, dtype=torch.float64)[:-1])
    numbers = torch.cat((above, below, torch.zeros(1, dtype=torch.float64))).sort().values
    return numbers / numbers.max()
