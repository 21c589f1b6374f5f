"""Custom losses that a client uploads: the graph that torch.fx traced is checked and evaluated."""
