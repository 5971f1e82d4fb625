"""Models: the reference transformer, adapters, modules of the user's own."""
