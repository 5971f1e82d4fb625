"""Which part of a job is this rank's, where layers or matrices are split? Stages, seats, samples.

A job is a pipeline of stages (one is a pipeline too). The ranks are numbered stage by stage, within
a stage by data-parallel rank, and tensor-parallel ranks stand next to each other. All stages see
the same micro-batches; each divides their samples among its own data-parallel ranks, so the degrees
of the stages need not agree.
"""

from __future__ import annotations

from dataclasses import dataclass
from itertools import accumulate, pairwise

from drystone.describe.layout import Schedule, Sharding
from drystone.errors import InvalidSpec
from drystone.plan.plan import Plan, StagePlan, Way


@dataclass(frozen=True, slots=True, kw_only=True)
class Stage:
    """Some ranks, and what each data-parallel rank among them takes."""

    first_rank: int
    tp: int
    samples: tuple[int, ...]  # of a micro-batch, at most, by data-parallel rank
    shares: tuple[float, ...]  # of the state, relative, by data-parallel rank

    @property
    def dp(self) -> int:
        """Data-parallel ranks."""
        return len(self.samples)

    @property
    def ranks(self) -> range:
        """All of them."""
        return range(self.first_rank, self.first_rank + self.dp * self.tp)

    def rank(self, dp_index: int, tp_index: int) -> int:
        """The number of one."""
        return self.first_rank + dp_index * self.tp + tp_index

    def runs(self, num_samples: int) -> list[range]:
        """Which of the first `num_samples` of a micro-batch each data-parallel rank computes."""
        ends = [min(end, num_samples) for end in (0, *accumulate(self.samples))]
        return [range(start, end) for start, end in pairwise(ends)]


@dataclass(frozen=True, slots=True, kw_only=True)
class Chunk:
    """Consecutive layers that a stage computes at a time; it has several when interleaved."""

    stage: int
    first_layer: int
    end_layer: int


@dataclass(frozen=True, slots=True, kw_only=True)
class Seat:
    """Where one rank is."""

    stage: int
    dp_index: int
    tp_index: int


@dataclass(frozen=True, slots=True, kw_only=True)
class CellLayout:
    """The whole job."""

    stages: tuple[Stage, ...]
    chunks: tuple[Chunk, ...]  # in the order of layers
    global_batch: int
    num_micro: int
    sharding: Sharding = Sharding.NONE
    schedule: Schedule = Schedule.ONE_F_ONE_B
    splits_sequence: bool = False  # norms and residual stream split over tp (Megatron's)

    @property
    def num_ranks(self) -> int:
        """Ranks of the job."""
        return self.stages[-1].ranks.stop

    @property
    def micro_batch(self) -> int:
        """Samples of a micro-batch over all data-parallel ranks; the last one may have fewer."""
        return -(-self.global_batch // self.num_micro)

    def num_samples(self, micro: int) -> int:
        """Samples of one micro-batch."""
        start = micro * self.micro_batch
        return max(0, min(self.micro_batch, self.global_batch - start))

    def seat(self, rank: int) -> Seat:
        """Where that rank is."""
        for index, stage in enumerate(self.stages):
            if rank in stage.ranks:
                dp_index, tp_index = divmod(rank - stage.first_rank, stage.tp)
                return Seat(stage=index, dp_index=dp_index, tp_index=tp_index)
        raise InvalidSpec(f"rank {rank} of {self.num_ranks}")

    def samples(self, seat: Seat, position: int) -> list[range]:
        """The global sample numbers of each micro-batch of a rank, in the step at `position`."""
        found = []
        for micro in range(self.num_micro):
            run = self.stages[seat.stage].runs(self.num_samples(micro))[seat.dp_index]
            start = position + micro * self.micro_batch
            found.append(range(start + run.start, start + run.stop))
        return found


def is_cell(plan: Plan) -> bool:
    """Whether the plan splits layers or matrices; data parallelism alone is another engine's."""
    return len(plan.stages) > 1 or plan.stages[0].tp > 1


def cell_layout(plan: Plan) -> CellLayout:
    """The layout of a plan, checked."""
    if plan.not_executable:
        raise InvalidSpec(f"the plan cannot be executed: {plan.not_executable}")
    if any(stage.cp * stage.ep > 1 for stage in plan.stages):
        raise InvalidSpec("a plan with context or expert parallelism cannot be executed yet")
    ends = [0, *(stage.end_layer for stage in plan.stages)]
    if [stage.first_layer for stage in plan.stages] != ends[:-1] or ends[-1] != (
        plan.model.num_layers
    ):
        raise InvalidSpec(f"the stages do not make up {plan.model.num_layers} layers in order")
    counts = {share.num_micro_batches for stage in plan.stages for share in stage.ranks}
    if len(counts) != 1 or min(counts) < 1:
        raise InvalidSpec(f"all ranks need one number of micro-batches, not {sorted(counts)}")
    layout = CellLayout(
        stages=_stages(plan),
        chunks=_chunks(plan),
        global_batch=plan.recipe.global_batch,
        num_micro=counts.pop(),
        sharding=_sharding(plan),
        schedule=plan.schedule,
        splits_sequence=plan.sequence_parallel,
    )
    for index, stage in enumerate(layout.stages):
        if sum(stage.samples) < layout.micro_batch:
            raise InvalidSpec(
                f"stage {index} computes {sum(stage.samples)} samples at a time, "
                f"a micro-batch has {layout.micro_batch}"
            )
    return layout


def _sharding(plan: Plan) -> Sharding:
    """ZeRO-3 that keeps what it gathered is ZeRO-2 with a late beginning."""
    keeps = plan.layout is not None and plan.layout.keep_gathered
    return min(plan.sharding, Sharding.ZERO2) if keeps else plan.sharding


def _stages(plan: Plan) -> tuple[Stage, ...]:
    stages, first_rank = [], 0
    for index, stage in enumerate(plan.stages):
        stages.append(_stage(stage, first_rank, index, is_uneven=plan.way is not Way.CELL))
        first_rank += stage.num_gpus
    return tuple(stages)


def _stage(stage: StagePlan, first_rank: int, index: int, *, is_uneven: bool) -> Stage:
    samples: list[int] = []
    shares: list[float] = []
    for share in stage.ranks:
        if share.count % stage.tp:
            raise InvalidSpec(f"stage {index}: {share.count} ranks do not form groups of tp")
        number = share.count // stage.tp
        samples += [share.micro_batch] * number
        shares += [share.state_share if is_uneven else 1.0] * number
    return Stage(first_rank=first_rank, tp=stage.tp, samples=tuple(samples), shares=tuple(shares))


def _chunks(plan: Plan) -> tuple[Chunk, ...]:
    """The stages' layers; interleaved, every stage has several smaller runs of them."""
    num_stages = len(plan.stages)
    if plan.virtual_stages == 1:
        return tuple(
            Chunk(stage=index, first_layer=one.first_layer, end_layer=one.end_layer)
            for index, one in enumerate(plan.stages)
        )
    number = num_stages * plan.virtual_stages
    each, rest = divmod(plan.model.num_layers, number)
    if rest or num_stages == 1:
        raise InvalidSpec(f"{plan.model.num_layers} layers cannot be interleaved {number} times")
    return tuple(
        Chunk(stage=index % num_stages, first_layer=index * each, end_layer=(index + 1) * each)
        for index in range(number)
    )
