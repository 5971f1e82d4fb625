"""Crius: jobs in order of arrival, on Cells."""
