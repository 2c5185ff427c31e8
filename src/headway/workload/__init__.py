"""Workloads: sources of requests, readers of public traces, generators."""
