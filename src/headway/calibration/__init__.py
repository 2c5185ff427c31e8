"""Measurements of real serving: read, replayed and compared; and coefficients fitted on them."""
