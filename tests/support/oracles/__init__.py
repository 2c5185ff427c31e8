"""Slow and plain programs that say what fast ones should."""
