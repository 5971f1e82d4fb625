"""One small process a node: it starts training processes, watches them, and outlives controllers.

Only the standard library is imported here, so that an agent stays small.
"""
