"""Orderings decide which request runs first, and which request is preempted first."""
