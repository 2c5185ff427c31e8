"""Regional plans: instances by model, region and GPU for the next hours (SageServe, section 5)."""
