"""Readers of public traces, one module per kind of file; `read` recognises the format."""
