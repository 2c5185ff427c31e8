"""Fleet plans: GPUs at hand for several models, with router, disaggregation and tiers decided."""
