"""Fleets x workloads x loads x seeds: policies ranked by what each loses against the best one of a cell."""
