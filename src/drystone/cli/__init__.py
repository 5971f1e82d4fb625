"""A thin shell over the stages: one file a verb."""
