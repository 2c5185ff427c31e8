"""Who goes first: one idea a file."""
