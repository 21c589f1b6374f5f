"""Recipes that need more than the Tinker API, in the cookbook's form."""
