"""Importing torch and transformers in half the time, by leaving out what a trace never calls.

The compiler, distributed tensors and symbolic shapes take about half of the time that importing a
transformers model takes. They are imported for names in type checks and decorators. Here they
become hollow modules: every attribute is a class of which there is no instance, so that
`isinstance` is false, and a decorator does nothing. Making an instance raises. If the trace then
fails, for that or any other reason, `trace.py` starts again without all this: it can cost time,
but not correctness.
"""

from __future__ import annotations

import importlib.abc
import importlib.machinery
import operator
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
    "torch.fx.experimental.symbolic_shapes",
    "torch.utils._sympy",
    "transformers.generation.continuous_batching",
)
# Instances that are only held: placements in tensor-parallel plans, the origins of fake tensors.
_INERT = ("torch.distributed", "torch._dynamo.source")
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
        base = _Inert if self.__name__.startswith(_INERT) else _Hollow
        value = _KNOWN[name] if name in _KNOWN else type(name, (base,), {})
        setattr(self, name, value)
        return value


class _Hollow:
    """Stands for any class or function of a module left out."""

    def __init__(self, *_: object, **__: object) -> None:
        raise RuntimeError(f"{type(self).__name__} was left out of the quick imports")


class _Inert(_Hollow):
    """Stands for a class whose instances are only held, never asked."""

    def __init__(self, *_: object, **__: object) -> None:
        """Take anything."""


def _unchanged(function: Callable[..., Any] | None = None, *_: object, **__: object) -> Any:
    """A decorator that does nothing, with or without arguments."""
    return _unchanged if function is None else function


def _always(value: object) -> Callable[..., Any]:
    return lambda *_, **__: value


# What is called even in a plain trace, where every size is a number and nothing is compiled.
_KNOWN: dict[str, Any] = {
    "disable": _unchanged,
    "allow_in_graph": _unchanged,
    "assume_constant_result": _unchanged,
    "disallow_in_graph": _unchanged,
    "forbid_in_graph": _unchanged,
    "nonstrict_trace": _unchanged,
    "mark_static": _always(None),
    "mark_static_address": _always(None),
    "optimize": _always(_unchanged),
    "is_compiling": _always(False),
    "graph_break": _always(None),
    "guard_or_false": bool,
    "guard_or_true": bool,
    "guard_size_oblivious": bool,
    "guard_int": int,
    "guarding_hint_or_throw": int,
    "has_guarding_hint": _always(True),
    "is_symbolic": _always(False),
    "statically_known_true": bool,
    "definitely_true": bool,
    "expect_true": bool,
    "is_nested_int": _always(False),
    "has_free_symbols": _always(False),
    "has_free_unbacked_symbols": _always(False),
    "free_unbacked_symbols": _always(frozenset()),
    "sym_and": lambda *claims: all(claims),
    "sym_or": lambda *claims: any(claims),
    "sym_eq": operator.eq,
    "_iterate_exprs": _always(()),
    "_iterate_nodes": _always(()),
}
