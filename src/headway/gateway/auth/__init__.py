"""Who may send requests, and how many: keys with their limits."""
