"""What running engines say of themselves, as a fleet file."""
