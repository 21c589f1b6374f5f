"""Model families: a folder's files as the engine's model, and how its weights are loaded."""
