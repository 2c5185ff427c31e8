"""Several gateways of one fleet: what they exchange through PostgreSQL, and which of them leads."""
