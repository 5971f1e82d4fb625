"""Checkpoints: written from any split, read into any other."""
