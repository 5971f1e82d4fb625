"""The names for a loop of your own; `docs/runtime.md` and `examples/train_uneven.py` show them."""

from drystone.run.runtime.batch import RankWork, rank_works
from drystone.run.runtime.data import SyntheticTokens, TokenFile, open_tokens
from drystone.run.runtime.group import joined
from drystone.run.runtime.layered import LayeredModel, NamedBlocks
from drystone.run.runtime.lora import add_adapters
from drystone.run.runtime.model import build_model
from drystone.run.runtime.step_report import StepReport
from drystone.run.runtime.trainer import Trainer

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
