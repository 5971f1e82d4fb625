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
    """Whether the plan splits layers or matrices, or gathers weights for every micro-batch.

    Data parallelism with whole weights, or layer by layer over all micro-batches, is the business
    of other engines (`run/train/uneven/`).
    """
    gathers = plan.way is Way.CELL and plan.sharding >= Sharding.ZERO2 and plan.num_gpus > 1
    return len(plan.stages) > 1 or plan.stages[0].tp > 1 or gathers


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


@dataclass(frozen=True, slots=True)
class Action:
    """One micro-batch through one chunk of layers, forward or backward."""

    is_forward: bool
    chunk: int  # of the whole pipeline
    micro: int


def stage_actions(
    schedule: Schedule, *, stage: int, num_stages: int, num_chunks: int, num_micro: int
) -> list[Action]:
    """What one stage does in a step, in order."""
    if num_chunks > num_stages:
        if num_micro % num_stages:
            raise InvalidSpec(
                f"{num_micro} micro-batches cannot be interleaved over {num_stages} stages",
                hint="Their number must be a multiple of that of the stages",
            )
        forward, backward = _interleaved(stage, num_stages, num_chunks // num_stages, num_micro)
        ahead = 2 * (num_stages - stage - 1) + num_chunks - num_stages
    else:
        forward = [Action(True, stage, micro) for micro in range(num_micro)]
        backward = [Action(False, stage, micro) for micro in range(num_micro)]
        ahead = num_stages - stage - 1
    if schedule is Schedule.GPIPE:
        ahead = len(forward)
    ahead = min(ahead, len(forward))
    actions = forward[:ahead]
    for one, other in zip(forward[ahead:], backward, strict=False):
        actions += [one, other]
    return actions + backward[len(forward) - ahead :]


def pipeline_order(
    schedule: Schedule, *, num_stages: int, num_chunks: int, num_micro: int
) -> list[Action]:
    """What all stages do in a step, in the order in which it would end if all were equally fast.

    That is how a planner balances them. Where it is so, a stage starts to receive what arrives
    during an action before that action. A backward pass counts as two forward passes. What ends at
    the same time does not depend on each other; what is nearer to its source comes first, so that
    the one after it can receive early.
    """
    left = [
        stage_actions(
            schedule, stage=stage, num_stages=num_stages, num_chunks=num_chunks, num_micro=num_micro
        )[::-1]
        for stage in range(num_stages)
    ]
    ends: dict[Action, int] = {}
    now = [0] * num_stages
    while any(left):
        for stage, actions in enumerate(left):
            while actions and needed_actions(actions[-1], num_chunks) <= ends.keys():
                action = actions.pop()
                inputs = needed_actions(action, num_chunks)
                start = max(now[stage], *(ends[one] for one in inputs), 0)
                now[stage] = ends[action] = start + (1 if action.is_forward else 2)
    return sorted(ends, key=lambda end: (ends[end], end.is_forward, _depth(end)))


def needed_actions(action: Action, num_chunks: int) -> set[Action]:
    """What must have ended before."""
    if action.is_forward:
        return {Action(True, action.chunk - 1, action.micro)} if action.chunk else set()
    needed = {Action(True, action.chunk, action.micro)}
    if action.chunk < num_chunks - 1:
        needed.add(Action(False, action.chunk + 1, action.micro))
    return needed


def _depth(action: Action) -> int:
    """How far from the source of its direction, up to a constant."""
    return action.chunk if action.is_forward else -action.chunk


def _interleaved(
    stage: int, num_stages: int, chunks_each: int, num_micro: int
) -> tuple[list[Action], list[Action]]:
    """Rounds of as many micro-batches as there are stages, through one chunk after another.

    The order of arXiv:2104.04473, section 2.2.
    """
    forward, backward = [], []
    for start in range(0, num_micro, num_stages):
        for turn in range(chunks_each):
            for micro in range(start, start + num_stages):
                ahead, behind = turn, chunks_each - 1 - turn
                forward.append(Action(True, ahead * num_stages + stage, micro))
                backward.append(Action(False, behind * num_stages + stage, micro))
    return forward, backward
