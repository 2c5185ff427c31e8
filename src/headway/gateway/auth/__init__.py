"""Authentication and rate limits: which clients may send requests, and how many."""
