"""Runs of load generators and served days: one reader per format, and one description of a run."""
