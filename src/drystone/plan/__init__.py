"""The best ways to run one job. It can be called: `drystone.plan("llama-3-8b", "8xH100")`."""

from __future__ import annotations

import sys
from types import ModuleType
from typing import Any


class _CallablePackage(ModuleType):
    """A module that is also the function `drystone.plan.answers.plan`."""

    def __call__(self, *args: Any, **kwargs: Any) -> Any:
        from drystone.plan.answers import plan

        return plan(*args, **kwargs)


sys.modules[__name__].__class__ = _CallablePackage
