"""The page at `/`: its files (static/), and the JSON that it requests."""
