"""Gavel: linear programmes over shares of time, and its version in Arena."""
