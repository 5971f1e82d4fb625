"""Pollux: a genetic search over who gets which GPUs."""
