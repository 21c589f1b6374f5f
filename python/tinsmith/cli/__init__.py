"""The commands of `tinsmith`."""
