"""Columns of a published run that say how it was split: from their words and numbers to a layout.

Each table of measurements has its own words for the same thing (`zero1 (distributed optimizer)`,
`FULL_SHARD`, `megatron-sp`). The rules are here, one function per column; those of the recipe are
in `recipe_columns.py`.
"""

from __future__ import annotations

import math
import re
from collections.abc import Mapping

from drystone.describe.layout import Layout, Schedule, Sharding
from drystone.describe.model import ModelSpec
from drystone.errors import RequestError, UnknownName

Row = Mapping[str, str]
# How tables say that a thing was not there, besides an empty cell.
SAID_NO = ("", "no", "none", "false", "off", "0", "-", "n/a", "na", "unstated")
# Larger numbers are slips of a pen: no model has as many heads, no job as many GPUs.
_LARGEST = 10**9


def whole_number_of(row: Row, name: str, default: int | None = None) -> int:
    """The whole number in a column; `default` where it is empty."""
    text = row.get(name, "")
    if text.lower() in SAID_NO and text != "0":
        if default is None:
            raise RequestError(f"column {name} is empty")
        return default
    value = number_of(row, name)
    if value != round(value) or value > _LARGEST:
        raise RequestError(f"column {name}: {text!r} is not a whole number up to {_LARGEST:,}")
    return round(value)


def number_of(row: Row, name: str) -> float:
    """The number in a column, perhaps with commas between thousands; 0 where it is empty."""
    text = row.get(name, "")
    plain = text.replace(",", "") if re.fullmatch(r"\d{1,3}(,\d{3})+(\.\d+)?", text) else text
    try:
        value = float(plain) if plain else 0.0
    except ValueError:
        raise RequestError(f"column {name}: {text!r} is not a number") from None
    if not 0 <= value < math.inf:
        raise RequestError(f"column {name}: {text!r} is not a number from 0 on")
    return value


def is_yes(row: Row, name: str) -> bool:
    """Whether a column says yes, in one of the ways in which tables say it."""
    return row.get(name, "").lower() in ("yes", "true", "on", "y", "1")


# --- the layout ------------------------------------------------------------------------------


def parse_layout(row: Row, model: ModelSpec) -> Layout:
    """How the run was split."""
    tp, pp = whole_number_of(row, "tp", 1), whole_number_of(row, "pp", 1)
    cp = whole_number_of(row, "cp", _ulysses(row.get("sp", "")))
    dp = _data_ranks(row, tp * pp * cp)
    virtual = _virtual_stages(row.get("vpp", ""), pp, model.num_layers)
    return Layout(
        dp=dp,
        tp=tp,
        pp=pp,
        cp=cp,
        ep=whole_number_of(row, "ep", 1),
        etp=_expert_tensor(row, tp=tp, ranks=dp * cp),
        micro_batch=_micro_batch(row, dp),
        sharding=_sharding(row["sharding"]),
        shard_size=_shard_size(row["sharding"], dp * cp, tp),
        sequence_parallel=tp > 1 and _has_sequence_parallel(row, tp),
        schedule=Schedule.INTERLEAVED if virtual > 1 else Schedule.ONE_F_ONE_B,
        virtual_stages=virtual,
        keep_gathered=re.search(_GRAD_OP, row["sharding"].lower()) is not None,
        vocab_barriers=_vocab_barriers(row.get("notes", ""), pp),
    )


def _expert_tensor(row: Row, *, tp: int, ranks: int) -> int:
    """Tensor parallelism of experts: stated, or as its launcher has it unless told otherwise.

    Megatron-LM divides experts as it divides everything else, where that leaves room for `ep`, and
    its tests state it in their names; what is built on it sets 1.
    """
    if row.get("etp"):
        return whole_number_of(row, "etp")
    if stated := re.search(r"_etp(\d+)", row.get("model", "")):
        return int(stated.group(1))
    is_plain = row["framework"].startswith("Megatron-LM core")
    return tp if is_plain and ranks % whole_number_of(row, "ep", 1) == 0 else 0


def _data_ranks(row: Row, others: int) -> int:
    """As stated; else what the other degrees leave of the GPUs."""
    gpus = whole_number_of(row, "gpus", 0)
    return whole_number_of(row, "dp", gpus // others if gpus and gpus % others == 0 else None)


def _micro_batch(row: Row, dp: int) -> int:
    """As stated; else the share of a rank in the batch, where the accumulation is stated."""
    batch, steps = whole_number_of(row, "global_batch", 0), whole_number_of(row, "grad_accum", 0)
    share = batch // (dp * steps) if steps and batch % (dp * steps) == 0 else 0
    return whole_number_of(row, "micro_batch", share or None)


def _has_sequence_parallel(row: Row, tp: int) -> bool:
    """Megatron's, which divides what tensor parallelism does not; Ulysses' is counted as `cp`."""
    text = row.get("sp", "").lower()
    if is_yes(row, "sp") or re.match(r"megatron|sequence.?parallel|sp\b", text) or text == str(tp):
        return True
    if text in SAID_NO or re.match(r"ulysses|ring|context", text):
        return False
    raise UnknownName("column sp", text, ["megatron-sp", "ulysses N", "yes", "no"])


def _ulysses(text: str) -> int:
    """Ranks that split the sequence in front of attention and the heads inside it."""
    match = re.match(r"ulysses\D*(\d+)", text.lower())
    return int(match.group(1)) if match else 1


def _shard_size(text: str, copies: int, tp: int) -> int:
    """Hybrid sharding: the stated group, or the copies of the model inside a node of eight."""
    if not re.match(_HYBRID, text.lower()):
        return 0
    match = re.search(r"(\d+)", text)
    return int(match.group(1)) if match else math.gcd(copies, max(1, 8 // max(1, tp)))


def _virtual_stages(text: str, pp: int, num_layers: int) -> int:
    if pp == 1 or not text:
        return 1
    match = re.search(r"(\d+)", text)
    number = max(1, int(match.group(1)) if match else 1)
    if text.startswith("layers/stage"):
        return max(1, num_layers // pp // number)
    return number


def _vocab_barriers(notes: str, pp: int) -> int:
    """Methods of the vocabulary-parallel pipelines of arXiv:2411.05288, by their names there."""
    match = re.match(r"method (vocab-1|vocab-2|vocab|synctwice|interlaced)\b", notes)
    if match is None:
        return 0
    name = match.group(1)
    if name == "interlaced":
        return pp // 2  # one and a half times the micro-batches in flight
    return 2 if name in ("synctwice", "vocab-1") else 1


_ZERO = r"zero[-_ ]?(?:stage[-_ =]?)?"
_HYBRID = r"hsdp|hybrid.?shard"
_GRAD_OP = r"^fsdp-grad-op|shard_grad_op"  # FSDP that keeps a layer gathered until its gradient
_SHARDINGS = (
    (r"no_shard", Sharding.NONE),
    (_GRAD_OP, Sharding.ZERO3),
    (
        rf"{_ZERO}(3|\+\+)|^stage.?3|^fsdp|megatron.fsdp|{_HYBRID}|^full.?shard|optim_grads_params",
        Sharding.ZERO3,
    ),
    (rf"{_ZERO}2|^stage.?2|optim_grads", Sharding.ZERO2),
    (rf"{_ZERO}1|^stage.?1|dist(ributed)?[-_ ]?opt|^optim$", Sharding.ZERO1),
    (rf"^no(ne)?\b|^d?dp$|ddp|{_ZERO}0|^$|^-$|^n/?a$|^single|data.?parallel", Sharding.NONE),
)


def _sharding(text: str) -> Sharding:
    for pattern, sharding in _SHARDINGS:
        if re.search(pattern, text.lower()):
            return sharding
    raise UnknownName("sharding", text, ["none", "ddp", "zero1", "zero2", "zero3", "fsdp-full"])
