"""An OpenAI-compatible engine without a model: the simulator's batches and step times, in real time."""
