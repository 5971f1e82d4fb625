"""Tracing a torch module without allocating it: `trace.py` and its parts, and `probe.py`."""
