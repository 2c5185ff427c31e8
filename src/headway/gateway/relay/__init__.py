"""One request between its client and an engine."""
