"""Drystone trains large models on whatever GPUs there are, or whatever a budget can rent."""

__version__ = "0.1.0"
