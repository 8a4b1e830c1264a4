"""Faster forms of the equations of `ops`: they compute the same, and run only where nothing prevents it."""
