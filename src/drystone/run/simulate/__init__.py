"""A world of virtual time: a list of what will happen, and faults drawn from a seed."""
