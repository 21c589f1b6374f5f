"""The transport under the routes: authorisation, back-pressure, limits for slow clients."""
