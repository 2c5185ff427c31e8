"""Several gateways of one fleet: what they exchange through a store, and which of them leads."""
