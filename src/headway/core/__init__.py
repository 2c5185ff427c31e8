"""The vocabulary: requests, fleets, views, decisions, policies, records. No I/O, no clock, no randomness."""
