"""Control's driver in real time: decides which replica serves a request."""
