"""What a server remembers: its database, the history of runs, timelines, traces."""
