"""Kernels behind the equations: what they compute is written in `ops`, and they run only where nothing speaks against it."""
