"""The demonstration: a small model that ships with the package learns four skills by SDFT."""
