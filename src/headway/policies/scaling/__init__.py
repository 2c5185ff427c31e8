"""Scalers: how many replicas each pool has."""
