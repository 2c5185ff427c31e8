"""Fleet plans: allocate the available GPUs to several models, and decide router, disaggregation and tiers."""
