"""OpenAI's files and batches: requests in files, kept in a database until they are answered."""
