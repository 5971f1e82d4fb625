"""Training a job whose layers or matrices are split."""
