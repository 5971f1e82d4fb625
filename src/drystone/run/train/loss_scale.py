"""How much is the loss multiplied by, so that gradients in fp16 neither vanish nor overflow?

The factor is halved when a gradient is not finite, and that step is left out; it doubles after many
steps without (arXiv:1710.03740 section 3.2; the numbers are those of torch.amp.GradScaler).
"""

from __future__ import annotations

import math
from dataclasses import dataclass, replace

FIRST, GROWTH, BACKOFF, PATIENCE_STEPS, LEAST, MOST = 2.0**16, 2.0, 0.5, 2000, 1.0, 2.0**24


@dataclass(frozen=True, slots=True)
class LossScale:
    """The factor, and the steps since it last changed."""

    factor: float = FIRST
    num_steps: int = 0

    def after(self, gradient_norm: float) -> LossScale:
        """What to go on with, once a step's gradient is known."""
        if not math.isfinite(gradient_norm):
            return LossScale(max(self.factor * BACKOFF, LEAST), 0)
        if self.num_steps + 1 >= PATIENCE_STEPS:
            return LossScale(min(self.factor * GROWTH, MOST), 0)
        return replace(self, num_steps=self.num_steps + 1)
