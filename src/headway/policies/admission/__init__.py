"""Admission policies: which requests are held back, and when they are released."""
