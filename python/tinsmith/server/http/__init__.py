"""The transport under the routes: who may ask, how much may wait, how slow a client may be."""
