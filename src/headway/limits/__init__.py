"""Limits of a key or a tenant: rates, and budgets of periods. The gateway and the simulator share them."""
