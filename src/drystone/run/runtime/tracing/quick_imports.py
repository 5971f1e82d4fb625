"""Importing torch and transformers in half the time, by leaving out what a trace never calls.

The compiler (`torch._dynamo`) and distributed tensors take 1.5 of the 4.3 seconds that importing a
transformers model takes. Both are imported for names in type checks and decorators. Here they
become empty modules whose every attribute is a class without content, so that `isinstance` is false
and a decorator does nothing. If the trace then fails for any reason, `trace.py` starts again
without this.
"""

from __future__ import annotations

import importlib.abc
import importlib.machinery
import sys
from collections.abc import Callable, Sequence
from types import ModuleType
from typing import Any

_HOLLOW = (
    "torch._dynamo",
    "torch._inductor",
    "torch.distributed._composable",
    "torch.distributed.checkpoint",
    "torch.distributed.fsdp",
    "torch.distributed.tensor",
    "transformers.generation.continuous_batching",
)
_REAL = ("torch._dynamo.config",)  # a table of settings, which fake tensors read


def install() -> None:
    """From now on, the modules above are hollow when they are imported."""
    sys.meta_path.insert(0, _HollowFinder())


class _HollowFinder(importlib.abc.MetaPathFinder, importlib.abc.Loader):
    """Finds hollow modules."""

    def find_spec(
        self, name: str, path: Sequence[str] | None, target: ModuleType | None = None
    ) -> importlib.machinery.ModuleSpec | None:
        """A hollow module for the names above and everything below them."""
        if name in _REAL or not any(name == one or name.startswith(f"{one}.") for one in _HOLLOW):
            return None
        return importlib.machinery.ModuleSpec(name, self, is_package=True)

    def create_module(self, spec: importlib.machinery.ModuleSpec) -> ModuleType:
        """An empty one."""
        return _HollowModule(spec.name)

    def exec_module(self, module: ModuleType) -> None:
        """Let real submodules be found where they lie."""
        root, *rest = module.__name__.split(".")
        module.__path__ = ["/".join([sys.modules[root].__path__[0], *rest])]


class _HollowModule(ModuleType):
    """A module that has every name."""

    def __getattr__(self, name: str) -> Any:
        if name.startswith("__"):
            raise AttributeError(name)
        known: dict[str, Any] = {
            "disable": _unchanged,
            "optimize": lambda *_, **__: _unchanged,
            "allow_in_graph": _unchanged,
            "is_compiling": lambda: False,
            "graph_break": lambda *_, **__: None,
        }
        value = known.get(name) or type(name, (_Hollow,), {})
        setattr(self, name, value)
        return value


class _Hollow:
    """Stands for any class of a module left out."""

    def __init__(self, *_: object, **__: object) -> None:
        """Take anything."""

    def __enter__(self) -> _Hollow:
        return self

    def __exit__(self, *_: object) -> None:
        return None


def _unchanged(function: Callable[..., Any] | None = None, *_: object, **__: object) -> Any:
    """A decorator that does nothing, with or without arguments."""
    return _unchanged if function is None else function
