"""Files that people write: jobs, clusters, markets, GPU types; and how errors in them read."""
