"""Orderings: which request runs first, and which one is preempted first."""
