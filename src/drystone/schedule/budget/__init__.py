"""Our policy for rented nodes: each job gets what its speedup is worth (after BOA)."""
