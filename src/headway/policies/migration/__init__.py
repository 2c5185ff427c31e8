"""Who goes to another replica: one idea a file."""
