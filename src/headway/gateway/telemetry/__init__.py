"""Metrics, rolling statistics and records."""
