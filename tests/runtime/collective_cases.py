"""What the ranks of the collectives' test do."""

from itertools import pairwise

import torch

from drystone.run.train.collectives import Form, Wire


def gather_and_reduce(
    many_cuts: list[tuple[int, ...]], dtype: torch.dtype
) -> list[dict[str, torch.Tensor]]:
    """For each cuts: what every form gathers and reduces."""
    wire = Wire()
    results = []
    for cuts in many_cuts:
        start, end = cuts[wire.rank], cuts[wire.rank + 1]
        piece = torch.arange(start, end).to(dtype) * 0.5
        gradient = (torch.arange(cuts[-1]) * (wire.rank + 1)).to(dtype)
        is_even = len({b - a for a, b in pairwise(cuts)}) == 1
        found = {}
        for form in (None, *Form):
            if form is Form.EVEN and not is_even:
                continue
            flat = torch.full((cuts[-1],), -1.0, dtype=dtype)
            if form is not Form.SPLIT:
                wire.gather(piece, flat, cuts, form).wait()
                found[f"gather {form}"] = flat
            out = torch.full((end - start,), -1.0, dtype=dtype)
            wire.reduce(gradient.clone(), out, cuts, form).wait()
            found[f"reduce {form}"] = out
        results.append(found)
    return results
