"""The routes of Tinker's API, and of clients that add to it. Each file has its table, ROUTES."""
