"""A thin shell over the stages: the REST API."""
