"""Model families: what a folder's files are to the engine, and how its weights get there."""
