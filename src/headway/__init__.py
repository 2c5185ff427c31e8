"""Headway: plan, rehearse and run fleets of LLM serving engines."""

__version__ = "0.2.0"
