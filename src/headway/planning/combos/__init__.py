"""Combo plans: the GPUs for prefill, the GPUs for decode, and the number of combos (Cauchy)."""
