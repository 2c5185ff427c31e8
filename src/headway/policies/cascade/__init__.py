"""Cascade policies: which of several models answers a request."""
