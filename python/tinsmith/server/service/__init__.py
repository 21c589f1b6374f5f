"""The state behind the routes: sessions, runs, samplers, and the promised futures."""
