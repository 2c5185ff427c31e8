"""Pure: a batch, a model, a GPU and an engine in; seconds and bytes out."""
