"""What every engine shares: what should run is compared with what does, and brought nearer."""
