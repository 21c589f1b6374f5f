"""Other processes that compute for a server: the channel to them, their loop, and who they are."""
