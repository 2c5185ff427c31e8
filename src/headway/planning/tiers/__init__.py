"""Tier plans: how many tiers of service, and how steeply headroom falls."""
