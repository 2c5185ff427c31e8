"""Chooses a scaler and its settings: GPU-hours against lateness."""
