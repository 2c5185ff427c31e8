"""Combo plans: which GPUs prefill, which decode, and how many (Cauchy)."""
