"""Settings for every test."""

from hypothesis import settings

# The same examples on every machine, and no failure because a machine is slow.
settings.register_profile("drystone", derandomize=True, deadline=None, max_examples=100)
settings.load_profile("drystone")
