"""Runs for human readers: a terminal table, an HTML page, a trace."""
