"""Training with unequal shares of batch and state, layer by layer."""
