"""Scalers decide the number of replicas of each pool."""
