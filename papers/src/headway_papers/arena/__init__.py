"""Fleets x workloads x loads x seeds: ranks policies by their loss against the best policy of each cell."""
