"""Several gateway processes with one scheduler."""
