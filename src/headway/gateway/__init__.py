"""The gateway: an OpenAI-compatible front door, and control's other driver, in real time."""
