"""HTTP towards engines."""
