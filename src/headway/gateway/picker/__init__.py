"""An endpoint picker for Envoy: the gateway decides, Envoy forwards the traffic."""
