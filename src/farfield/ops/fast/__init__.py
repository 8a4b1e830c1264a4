"""Kernels behind the equations of `ops`: they compute the same, and run only where nothing speaks against it."""
