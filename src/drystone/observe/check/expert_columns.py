"""How a published run treated its experts, from the columns and notes of its row.

Columns `dispatch`, `graphs` and `routing` say it outright (`fused, overlap`; `full`; `forced`).
Where a table has none, its notes and the name of the framework do, in their own words.
"""

from __future__ import annotations

import re
from collections.abc import Mapping
from typing import Any

from drystone.describe.recipe import CudaGraphs, ExpertDispatch
from drystone.errors import UnknownName

_DISPATCHES = (
    (r"fused|deep-?ep|hybrid-?ep", ExpertDispatch.FUSED),
    (r"all-?to-?all", ExpertDispatch.ALLTOALL),
)
_GRAPHS = (
    (r"full[- ]iteration", CudaGraphs.FULL),
    (r"layer graphs|partial graphs", CudaGraphs.LAYERS),
    (r"no graphs", CudaGraphs.NONE),
)


def expert_fields(row: Mapping[str, str]) -> dict[str, Any]:
    """The fields of a recipe that say how experts were run; what is not stated is left out."""
    told = f"{row['framework']}; {row.get('notes', '')}".lower()
    fields: dict[str, Any] = {}
    stated = row.get("dispatch", "").lower()
    for pattern, dispatch in _DISPATCHES:
        if re.search(pattern, stated or told):
            fields["expert_dispatch"] = dispatch
            break
    if graphs := row.get("graphs", ""):
        try:
            fields["cuda_graphs"] = CudaGraphs(graphs)
        except ValueError:
            raise UnknownName("column graphs", graphs, list(CudaGraphs)) from None
    elif found := [kind for pattern, kind in _GRAPHS if re.search(pattern, told)]:
        fields["cuda_graphs"] = found[0]
    fields["overlap_dispatch"] = "overlap" in stated or "ep overlap" in told
    fields["balanced_experts"] = "forced" in row.get("routing", "") or "forced balance" in told
    return fields
