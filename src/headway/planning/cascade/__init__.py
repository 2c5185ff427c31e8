"""Cascade plans: thresholds, GPUs for each model, and their shapes (Cascadia, section 3)."""
