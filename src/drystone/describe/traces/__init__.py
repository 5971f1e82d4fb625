"""Traces of jobs: our own CSV, `sacct`, public formats, and measured speeds."""
