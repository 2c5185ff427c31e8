"""HTTP towards clients."""
