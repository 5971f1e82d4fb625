"""From the state of a cluster to the snapshot that a policy sees."""
