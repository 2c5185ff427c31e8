"""Generates a fleet file from the answers of running engines."""
