"""Reads measurements of real serving, replays and compares them, and fits coefficients to them."""
