"""OpenAI's files and batches: files of requests, stored in a database until the requests are answered."""
