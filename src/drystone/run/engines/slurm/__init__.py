"""Slurm as an engine, by its commands: `sbatch`, `squeue`, `scontrol`, `sinfo` and `scancel`."""
