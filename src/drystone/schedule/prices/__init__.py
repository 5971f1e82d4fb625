"""Our policy for a fixed cluster: each job picks its best option at shadow prices."""
