"""The names for a loop of your own; `docs/runtime.md` and `examples/train_uneven.py` show them."""

from drystone.run.train.data import RankWork, SyntheticTokens, TokenFile, open_tokens, rank_works
from drystone.run.train.group import joined
from drystone.run.train.models.layered import LayeredModel, NamedBlocks
from drystone.run.train.models.lora import add_adapters
from drystone.run.train.models.transformer import build_model
from drystone.run.train.step_report import StepReport
from drystone.run.train.trainer import Trainer

__all__ = [
    "LayeredModel",
    "NamedBlocks",
    "RankWork",
    "StepReport",
    "SyntheticTokens",
    "TokenFile",
    "Trainer",
    "add_adapters",
    "build_model",
    "joined",
    "open_tokens",
    "rank_works",
]
