"""The HTTP server: requests of the Tinker SDK are read, checked, queued, and answered."""
