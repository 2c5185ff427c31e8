"""The conformance kit: checks that every policy must pass."""
