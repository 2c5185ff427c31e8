"""The gateway's HTTP API."""
