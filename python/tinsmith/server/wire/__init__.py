"""Tinker's wire: protobuf and JSON to checked, plain values, and results back."""
