"""Which requests are kept for later: one idea a file."""
