"""Memory on each rank, item by item, at the moment of a step when it is largest."""
