"""A fleet as other systems want it: manifests for Kubernetes."""
