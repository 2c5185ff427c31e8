"""Headway from Python: what `import headway as hw` offers, over the same parts as the command line."""
