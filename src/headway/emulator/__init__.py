"""An OpenAI-compatible engine without a model. It runs the simulator's batches and step times in real time."""
