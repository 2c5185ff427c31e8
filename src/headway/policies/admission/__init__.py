"""Admission policies decide which requests are held, and when they are released."""
