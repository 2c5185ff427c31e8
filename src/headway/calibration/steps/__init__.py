"""Calibration on an engine's own iterations: what each one held, and how long it took."""
