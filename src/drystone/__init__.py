"""Drystone trains large models on whatever GPUs there are, or whatever a budget can rent."""

from __future__ import annotations

from importlib import import_module
from typing import Any

__version__ = "0.2.0"


def __getattr__(name: str) -> Any:
    """`plan`, `submit`, `contract`: loaded when first used, so that importing drystone is quick."""
    if name == "plan":
        return import_module("drystone.plan")
    if name == "submit":
        return import_module("drystone.service.submission").submit
    if name == "contract":
        return import_module("drystone.run.contract")
    raise AttributeError(f"module 'drystone' has no attribute {name!r}")
