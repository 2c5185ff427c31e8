"""Metrics, traces, rolling statistics and records."""
