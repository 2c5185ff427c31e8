"""HTTP to engines: the client, the engines' dialects, health, and reports."""
