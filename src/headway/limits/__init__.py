"""What a key or a tenant may use: rates, and budgets of periods. The gateway and the simulator use the same."""
