"""Which of several models' answers a request gets."""
