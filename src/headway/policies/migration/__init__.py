"""Migration policies: which requests move to another replica."""
