"""How does a rank start without torch's compiler? It is a fifth of the start, and few compile.

Making a parameter or an optimizer imports `torch._dynamo`, just to ask it to leave the function
that is called alone (`torch/_compile.py`), and every optimizer step asks it for a break in a graph
that nobody makes. Until the real one is wanted, a stand-in answers these two. Whoever wants
anything else of it (`torch.compile` in a user's module) gets the real one, imported then; what the
stand-in was asked to leave alone is asked of the real one again.
"""

from __future__ import annotations

import importlib
import importlib.abc
import importlib.machinery
import sys
from collections.abc import Sequence
from types import ModuleType
from typing import Any

import torch

_NAME = "torch._dynamo"
_CACHE = "__dynamo_disable"  # where torch/_compile.py keeps the answer


def install() -> None:
    """From now on the compiler is imported when it is wanted, unless it was already."""
    if _NAME not in sys.modules:
        stand_in = _StandIn()
        sys.modules[_NAME] = torch._dynamo = stand_in
        sys.meta_path.insert(0, stand_in.finder)


class _StandIn(ModuleType):
    """Has the two names that plain training asks for, and every other one of the real module."""

    def __init__(self) -> None:
        super().__init__(_NAME)
        self.__path__ = [f"{torch.__path__[0]}/_dynamo"]
        self.__file__ = f"{self.__path__[0]}/__init__.py"
        self.finder = _PartFinder(self)
        self._left_alone: list[Any] = []

    def disable(self, fn: Any = None, *args: Any, **kwargs: Any) -> Any:
        """The function as it is, if `torch/_compile.py` asks: it keeps the answer."""
        if fn is None or kwargs != {"wrapping": False} or not self._is_current:
            return self.real().disable(fn, *args, **kwargs)
        self._left_alone.append(fn)
        return fn

    def graph_break(self, *args: Any, **kwargs: Any) -> None:
        """Nothing is broken where nothing is compiled."""
        if not self._is_current:
            self.real().graph_break(*args, **kwargs)

    def real(self) -> ModuleType:
        """The compiler itself, in the place of this."""
        if self._is_current:
            sys.meta_path.remove(self.finder)
            for function in self._left_alone:
                function.__dict__.pop(_CACHE, None)
            del sys.modules[_NAME], torch._dynamo
        return importlib.import_module(_NAME)

    @property
    def _is_current(self) -> bool:
        return sys.modules.get(_NAME) is self

    def __getattr__(self, name: str) -> Any:
        if name.startswith("__"):  # asked of every module, by `inspect` and `warnings`
            raise AttributeError(name)
        return getattr(self.real(), name)


class _PartFinder(importlib.abc.MetaPathFinder, importlib.abc.Loader):
    """Whoever imports a part of the compiler imports the compiler first."""

    def __init__(self, stand_in: _StandIn) -> None:
        self._stand_in = stand_in
        self._spec: importlib.machinery.ModuleSpec | None = None

    def find_spec(
        self, name: str, path: Sequence[str] | None, target: ModuleType | None = None
    ) -> importlib.machinery.ModuleSpec | None:
        """The part as it is after that, where the whole has imported it."""
        if not name.startswith(f"{_NAME}."):
            return None
        self._stand_in.real()
        if name not in sys.modules:
            return None
        return importlib.machinery.ModuleSpec(name, self)

    def create_module(self, spec: importlib.machinery.ModuleSpec) -> ModuleType:
        """The one that is there."""
        module = sys.modules[spec.name]
        self._spec = module.__spec__
        return module

    def exec_module(self, module: ModuleType) -> None:
        """It was executed; only what the import machinery has written over is put back."""
        module.__spec__ = self._spec
