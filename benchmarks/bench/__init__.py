"""Runs every benchmark, checks its figures against their ranges, and writes `RESULTS.md`."""
