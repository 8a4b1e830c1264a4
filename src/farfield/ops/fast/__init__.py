"""Faster forms of the equations of `ops`: equal up to rounding; where they do not apply, the equations run."""
