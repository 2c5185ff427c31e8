"""The HTTP API towards clients."""
