"""Headway's Python API, offered by `import headway as hw`, based on the same parts as the command line."""
