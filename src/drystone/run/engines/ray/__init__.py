"""Ray as an engine: its nodes and its locks, our agents. The only place that imports ray."""
