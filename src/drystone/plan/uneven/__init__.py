"""Data parallelism over unlike GPUs: batch and state decided apart (Cephalo)."""
