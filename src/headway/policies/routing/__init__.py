"""Which replica gets a request: one idea a file."""
