"""The in-process API: tinsmith.Model, Adapter and Sampler, for training loops without a server."""
