"""How one job is split over GPUs: one `Layout`, or thousands of them as arrays (`Layouts`)."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, fields, replace
from enum import IntEnum, StrEnum

import numpy as np
import numpy.typing as npt

from drystone.describe.model import Block, Experts, ModelSpec
from drystone.describe.recipe import Recipe
from drystone.errors import InvalidSpec, UnknownName

IntArray = npt.NDArray[np.int64]


_MOST = 10**6  # of any degree: beyond it somebody mistyped


class Sharding(IntEnum):
    """What data-parallel ranks split among themselves instead of repeating."""

    NONE = 0  # plain data parallel (DDP, ZeRO-0)
    ZERO1 = 1  # optimizer state
    ZERO2 = 2  # and gradients
    ZERO3 = 3  # and weights (FSDP)


class Schedule(StrEnum):
    """In which order a pipeline runs its micro-batches."""

    ONE_F_ONE_B = "1f1b"
    GPIPE = "gpipe"
    INTERLEAVED = "interleaved"


@dataclass(frozen=True, slots=True, kw_only=True)
class Layout:
    """One split. It uses dp x cp x tp x pp GPUs; expert parallelism lies within dp x cp x tp."""

    dp: int = 1
    tp: int = 1
    pp: int = 1
    cp: int = 1
    ep: int = 1
    etp: int = 0  # tensor parallelism inside experts; 0: as tp where ep is 1, else 1
    micro_batch: int = 1  # sequences per data-parallel rank at a time
    sharding: Sharding = Sharding.NONE
    shard_size: int = 0  # ranks that share one copy (hybrid sharding); 0: all dp x cp
    sequence_parallel: bool = False  # Megatron's: norms and dropouts split over tp
    schedule: Schedule = Schedule.ONE_F_ONE_B
    virtual_stages: int = 1  # model chunks per pipeline rank, interleaved schedule
    keep_gathered: bool = False  # ZeRO-3 without resharding after the forward pass (grad-op)
    # Embedding and head spread over all pipeline stages (arXiv:2411.05288): the number of barriers
    # of the schedule, each of which keeps one more micro-batch in flight. 0: first and last stage.
    vocab_barriers: int = 0

    def __post_init__(self) -> None:
        for name in ("dp", "tp", "pp", "cp", "ep", "micro_batch", "virtual_stages"):
            if not 1 <= getattr(self, name) <= _MOST:
                raise InvalidSpec(f"layout: {name} is {getattr(self, name)}, must be 1 to {_MOST}")
        ranks = self.dp * self.cp
        if self.shard_size and ranks % self.shard_size:
            raise InvalidSpec(
                f"layout: shard_size {self.shard_size} does not divide dp x cp = {ranks}"
            )
        if not 0 <= self.etp <= _MOST:
            raise InvalidSpec(f"layout: etp is {self.etp}, must be 0 to {_MOST}")
        in_stage, in_experts = self.dp * self.cp * self.tp, self.ep * self.expert_tp
        if in_stage % in_experts:
            asked = f"ep={self.ep}" if not self.etp else f"ep x etp = {self.ep} x {self.etp}"
            raise InvalidSpec(f"layout: {asked} does not divide dp x cp x tp = {in_stage}")
        if self.pp == 1 and (self.virtual_stages > 1 or self.vocab_barriers):
            raise InvalidSpec("layout: virtual stages and a spread vocabulary need pp > 1")
        if self.vocab_barriers < 0 or self.shard_size < 0:
            raise InvalidSpec("layout: vocab and shard must be >= 0")

    @property
    def num_gpus(self) -> int:
        """GPUs it takes."""
        return self.dp * self.cp * self.tp * self.pp

    @property
    def expert_tp(self) -> int:
        """Ranks that share one expert's matrices."""
        return self.etp or (self.tp if self.ep == 1 else 1)

    def __str__(self) -> str:
        parts = [f"dp={self.dp}", f"tp={self.tp}", f"pp={self.pp}"]
        parts += [
            f"{name}={getattr(self, name)}" for name in ("cp", "ep") if getattr(self, name) > 1
        ]
        if self.etp:
            parts.append(f"etp={self.etp}")
        parts.append(f"micro={self.micro_batch}")
        if self.sharding:
            parts.append(f"zero={int(self.sharding)}")
        if self.shard_size:
            parts.append(f"shard={self.shard_size}")
        if self.sequence_parallel:
            parts.append("sp=1")
        if self.virtual_stages > 1:
            parts.append(f"vpp={self.virtual_stages}")
        if self.schedule is Schedule.GPIPE:
            parts.append("schedule=gpipe")
        if self.keep_gathered:
            parts.append("keep=1")
        if self.vocab_barriers:
            parts.append(f"vocab={self.vocab_barriers}")
        return ",".join(parts)


_KEYS = {
    "dp": "dp", "tp": "tp", "pp": "pp", "cp": "cp", "ep": "ep", "etp": "etp",
    "micro": "micro_batch", "zero": "sharding", "shard": "shard_size", "sp": "sequence_parallel",
    "vpp": "virtual_stages", "schedule": "schedule", "keep": "keep_gathered",
    "vocab": "vocab_barriers",
}  # fmt: skip


def parse_layout(text: str) -> Layout:
    """A layout from `dp=8,tp=2,pp=1,micro=2,zero=3`; what is left out is 1 (or off)."""
    values: dict[str, object] = {}
    for part in filter(None, (one.strip() for one in text.split(","))):
        key, equals, raw = (one.strip() for one in part.partition("="))
        if not equals:
            raise InvalidSpec(
                f"layout: {part!r} has no value", hint="Write it like dp=8,tp=2,micro=1"
            )
        if key not in _KEYS:
            raise UnknownName("layout key", key, _KEYS, where=f"layout {text!r}")
        if _KEYS[key] in values:
            raise InvalidSpec(f"layout: {key!r} is given twice in {text!r}")
        values[_KEYS[key]] = _parse_value(key, raw)
    layout = Layout(**values)  # type: ignore[arg-type]
    if layout.virtual_stages > 1 and layout.schedule is Schedule.ONE_F_ONE_B:
        layout = replace(layout, schedule=Schedule.INTERLEAVED)
    return layout


def _parse_value(key: str, raw: str) -> object:
    if key == "schedule":
        try:
            return Schedule(raw)
        except ValueError:
            raise UnknownName("pipeline schedule", raw, [s.value for s in Schedule]) from None
    try:
        number = int(raw)
    except ValueError:
        raise InvalidSpec(f"layout: {key}={raw} is not a whole number") from None
    if key == "zero":
        if not 0 <= number <= 3:
            raise InvalidSpec(f"layout: zero={number}, must be 0, 1, 2 or 3")
        return Sharding(number)
    if key in ("sp", "keep"):
        if number not in (0, 1):
            raise InvalidSpec(f"layout: {key}={number}, must be 0 or 1")
        return bool(number)
    return number


def check_layout(model: ModelSpec, recipe: Recipe, layout: Layout) -> list[str]:
    """Why this model cannot be split like that; empty when it can."""
    problems = []
    for block in model.blocks:
        problems += _check_block(block, layout)
    if layout.ep > 1 and not model.is_moe:
        problems.append(f"ep={layout.ep}, but {model.name} has no experts")
    # Embedding and loss may stand in the place of a layer: 94 layers fill 96 virtual stages.
    if layout.pp * layout.virtual_stages > model.num_layers + 2 * (layout.virtual_stages > 1):
        problems.append(
            f"{model.num_layers} layers do not fill {layout.pp * layout.virtual_stages} "
            "pipeline stages"
        )
    per_step = layout.dp * layout.micro_batch
    if recipe.global_batch % per_step:
        problems.append(
            f"the global batch of {recipe.global_batch} is not divisible by "
            f"dp x micro = {layout.dp} x {layout.micro_batch} = {per_step}"
        )
    if recipe.seq_len % layout.cp:
        problems.append(f"the sequence length {recipe.seq_len} is not divisible by cp={layout.cp}")
    return list(dict.fromkeys(problems))


def _check_block(block: Block, layout: Layout) -> list[str]:
    problems = []
    tp, heads, kv_heads = layout.tp, block.attention.num_heads, block.attention.num_kv_heads
    if heads % tp:
        problems.append(f"{heads} attention heads are not divisible by tp={tp}")
    elif kv_heads % tp and tp % kv_heads:
        problems.append(
            f"{kv_heads} key-value heads can be neither divided nor repeated by tp={tp}"
        )
    if isinstance(block.feed_forward, Experts):
        num_experts = block.feed_forward.num_experts
        if num_experts % layout.ep:
            problems.append(f"{num_experts} experts are not divisible by ep={layout.ep}")
    elif block.feed_forward.ffn_size % tp:
        ffn_size = block.feed_forward.ffn_size
        problems.append(f"the feed-forward size {ffn_size} is not divisible by tp={tp}")
    return problems


@dataclass(frozen=True, slots=True, kw_only=True)
class Layouts:
    """Many splits as arrays of one length: what the planner's search works on."""

    dp: IntArray
    tp: IntArray
    pp: IntArray
    cp: IntArray
    ep: IntArray
    etp: IntArray  # never 0: resolved as in `Layout.expert_tp`
    micro_batch: IntArray
    sharding: IntArray  # Sharding codes
    shard_size: IntArray  # never 0: resolved to dp x cp
    sequence_parallel: IntArray  # 0 or 1
    gpipe: IntArray  # 1: every micro-batch of the step is in flight at once
    virtual_stages: IntArray
    keep_gathered: IntArray
    vocab_barriers: IntArray

    def __len__(self) -> int:
        return len(self.dp)

    @classmethod
    def of(cls, layouts: Sequence[Layout]) -> Layouts:
        """Single layouts, gathered."""

        def column(name: str) -> IntArray:
            return np.array([int(getattr(one, name)) for one in layouts], dtype=np.int64)

        names = [one.name for one in fields(cls) if one.name != "gpipe"]
        gpipe = np.array([one.schedule is Schedule.GPIPE for one in layouts], dtype=np.int64)
        columns = {name: column(name) for name in names}
        return cls.build(**columns, gpipe=gpipe)

    @classmethod
    def build(cls, **columns: npt.ArrayLike) -> Layouts:
        """From arrays or numbers; what is left out is 1 (or off); everything is broadcast."""
        known = [one.name for one in fields(cls)]
        for name in columns:
            if name not in known:
                raise UnknownName("layout column", name, known)
        off = {"sharding": 0, "etp": 0, "shard_size": 0, "sequence_parallel": 0, "gpipe": 0,
               "keep_gathered": 0, "vocab_barriers": 0}  # fmt: skip
        given = [np.asarray(columns.get(name, off.get(name, 1)), dtype=np.int64) for name in known]
        arrays = dict(
            zip(known, np.broadcast_arrays(*[np.atleast_1d(a) for a in given]), strict=True)
        )
        usual = np.where(arrays["ep"] == 1, arrays["tp"], 1)
        arrays["etp"] = np.where(arrays["etp"] > 0, arrays["etp"], usual)
        all_ranks = arrays["dp"] * arrays["cp"]
        arrays["shard_size"] = np.where(arrays["shard_size"] > 0, arrays["shard_size"], all_ranks)
        return cls(**arrays)

    @property
    def num_gpus(self) -> IntArray:
        """GPUs that each takes."""
        return self.dp * self.cp * self.tp * self.pp
