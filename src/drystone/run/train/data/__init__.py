"""Tokens, and which rank computes which samples."""
