"""A simulated run as tables, series, a page and a timeline."""
