"""Several gateways of one fleet: their exchange through a store, and their leader."""
