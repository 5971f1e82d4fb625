"""A thin shell over the stages: one file a verb, or a subject of short ones."""
