"""Work that nobody waits for: files of requests, kept in a database until they are answered."""
