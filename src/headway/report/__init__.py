"""Summaries and records as a person reads them: a table, an HTML page, a trace."""
