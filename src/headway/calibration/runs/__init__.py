"""Runs of load generators and served days: one reader a format, one description of a run."""
