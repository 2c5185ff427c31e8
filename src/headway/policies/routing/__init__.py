"""Routers decide which replica gets a request."""
