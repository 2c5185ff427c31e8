"""Exports a fleet as manifests for Kubernetes."""
