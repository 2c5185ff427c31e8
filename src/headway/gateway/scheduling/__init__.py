"""Control's driver in real time: which replica serves a request."""
