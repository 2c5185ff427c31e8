"""An endpoint picker for Envoy: the gateway's decisions, and Envoy's data plane."""
