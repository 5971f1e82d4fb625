"""What runs taught about one kind of work, as a fold over what was learned."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, field, replace

from drystone.run.control.notes import Learned

Gpus = tuple[tuple[str, int], ...]  # by type


@dataclass(frozen=True, slots=True, kw_only=True)
class Lesson:
    """What is known about one kind of work."""

    speeds: Mapping[Gpus, float] = field(default_factory=dict)  # measured
    factors: Mapping[Gpus, float] = field(default_factory=dict)
    memory_share: float = 1.0  # true need over estimate, at least
    paces: tuple[tuple[str, int, float], ...] = ()  # as in `Learned`; plans are made with them
    kept: Mapping[Gpus, str] = field(default_factory=dict)  # the fastest of the plans tried there

    def after(self, note: Learned) -> Lesson:
        """With what a run taught."""
        lesson = self
        if note.measured_samples_per_second > 0:
            factor = note.measured_samples_per_second / note.estimated_samples_per_second
            lesson = replace(
                lesson,
                speeds={**lesson.speeds, note.gpus: note.measured_samples_per_second},
                factors={**lesson.factors, note.gpus: factor},
            )
        if note.memory_share > 0:
            lesson = replace(lesson, memory_share=max(lesson.memory_share, note.memory_share))
        if note.paces:  # estimates have them from now on: factors of earlier ones say nothing
            lesson = replace(lesson, paces=note.paces, factors={})
        if note.kept:
            lesson = replace(lesson, kept={**lesson.kept, note.gpus: note.kept})
        return lesson
