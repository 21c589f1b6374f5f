"""Other people's clients and suites, run against a server on request."""
