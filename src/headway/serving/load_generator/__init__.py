"""A load generator: sends a workload's requests to a running engine and measures the answers."""
