"""Recipes that need more of a backend than the Tinker API has, in the form of the cookbook's."""
