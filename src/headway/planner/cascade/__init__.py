"""Plans for cascades of models: which thresholds, how many GPUs for each model, in which shapes (Cascadia, 3)."""
