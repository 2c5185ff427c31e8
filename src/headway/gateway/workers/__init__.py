"""Several gateway processes and the one scheduler that they ask."""
