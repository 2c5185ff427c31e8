"""Operator latencies of a GPU at hand: what to measure, how to time it, and the file that calibration reads."""
