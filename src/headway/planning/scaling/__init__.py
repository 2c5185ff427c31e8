"""Which scaler, with which settings: GPU-hours against lateness."""
