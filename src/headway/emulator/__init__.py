"""An OpenAI-compatible engine that computes nothing: it keeps real time by perf, and batches as the simulator does."""
