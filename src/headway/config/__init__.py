"""Files that users write: read strictly, checked, and turned into a fleet."""
