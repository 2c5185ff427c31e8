"""What to change in a fleet that has run: recorded days rehearsed as they were, and as they could have been."""
