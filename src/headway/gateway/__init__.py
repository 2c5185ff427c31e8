"""The gateway: an OpenAI-compatible endpoint, and the driver of control in real time."""
