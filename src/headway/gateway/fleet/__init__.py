"""Starts, drains and stops replicas."""
