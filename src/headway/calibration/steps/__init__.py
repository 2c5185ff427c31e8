"""Calibration from an engine's own iterations: their batches and durations."""
