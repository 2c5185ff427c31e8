"""Readers of public traces and of our own files, one module per format."""
