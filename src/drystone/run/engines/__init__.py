"""Engines behind one contract: agents on nodes, one machine, Ray, Slurm."""
