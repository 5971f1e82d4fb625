"""Pipelines over groups of unlike GPUs."""
