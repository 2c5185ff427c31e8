"""Measures operator latencies of a local GPU: which operators, their timing, and the file that calibration reads."""
