"""The page at `/`: its files (static/), and what it asks for as JSON."""
