"""How unequal the loads of expert-parallel ranks are: the fullest one decides, in time and memory.

Routers do not send every expert as many tokens. The load of single experts spreads around the mean;
that of a rank with several of them less; and of many ranks the fullest lies about sqrt(2 ln ranks)
spreads above the mean. Layers route by themselves, so what a rank keeps of several layers evens out
as the square root of their number.
"""

from __future__ import annotations

import numpy as np
import numpy.typing as npt

from drystone.describe.recipe import Recipe

FloatArray = npt.NDArray[np.float64]

# Spread of the load of single experts in one micro-batch, natural routing, over its mean.
# Published: arXiv:2408.15664 table 2 has the fullest of 64 experts 0.72 above the mean over whole
# batches under an auxiliary loss, 2.9 spreads; a single micro-batch spreads about twice as far.
_LOAD_SPREAD = 0.5


def fullest_excess(recipe: Recipe, num_experts: int, ep: FloatArray) -> FloatArray:
    """What the fullest rank has above the mean load of one layer, as a share of that mean."""
    if recipe.balanced_experts or not num_experts:
        return np.zeros_like(ep)
    each = np.maximum(1.0, num_experts / ep)
    excess: FloatArray = _LOAD_SPREAD * np.sqrt(2.0 * np.log(ep) / each)
    return excess
