"""Proposes changes to a fleet: recorded days are rehearsed as they ran, and with changes."""
