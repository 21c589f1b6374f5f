"""What a server keeps: its database, the history of runs, timelines, traces."""
