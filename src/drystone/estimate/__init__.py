"""What it would cost: parameters, memory, compute, communication, one step; itemised."""
