"""Tier plans: the number of service tiers, and the decay of headroom."""
