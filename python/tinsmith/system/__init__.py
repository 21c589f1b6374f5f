"""The base layer: files and folders that change whole or not at all, locks, default paths."""
