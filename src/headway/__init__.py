"""Headway: plan, rehearse and run fleets of LLM serving engines."""

__version__ = "0.1.0"
