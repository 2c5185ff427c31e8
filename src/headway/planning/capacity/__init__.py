"""Capacity plans: the cheapest fleet of equal replicas that meets its targets."""
