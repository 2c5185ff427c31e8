"""How many replicas there are: one idea a file."""
