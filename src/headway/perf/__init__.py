"""Seconds and bytes of a batch for a model, a GPU and an engine, as pure functions."""
