"""Tinker's wire format: from protobuf and JSON to checked, plain values, and results back."""
