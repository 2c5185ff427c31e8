"""Pure functions from a run's records to its summary and its charts' series."""
