"""Cells: n equal GPUs, split by data, tensor and pipeline parallelism (Crius)."""
