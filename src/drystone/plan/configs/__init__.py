"""Configs of other training tools: what they ask for, and a plan written in their words."""
