"""Modules of the user's own: traced in another process, estimated here."""
