"""A world of virtual time: a heap of what will happen, and faults drawn from a seed."""
