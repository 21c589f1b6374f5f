"""What the routes work on: sessions, runs, samplers, and the futures that were promised."""
