"""A load generator: requests of a workload sent to a running engine, and what was measured of each."""
