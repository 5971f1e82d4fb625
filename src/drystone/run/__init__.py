"""Making it happen, simulated or real."""
