"""HTTP towards engines: the client, their dialects, their health, and what they report."""
