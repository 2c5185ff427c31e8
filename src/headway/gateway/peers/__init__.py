"""Several gateways of one fleet: what they tell each other through PostgreSQL, and which of them leads."""
