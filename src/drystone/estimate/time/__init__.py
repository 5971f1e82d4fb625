"""The time of one step: compute, communication, and what of it shows."""
