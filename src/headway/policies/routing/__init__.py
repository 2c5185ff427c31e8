"""Routers: which replica gets a request."""
