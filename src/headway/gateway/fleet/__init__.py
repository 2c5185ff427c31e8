"""Replicas that start, serve, drain and stop."""
