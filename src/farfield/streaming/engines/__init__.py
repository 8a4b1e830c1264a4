"""Engines: who calls `Stream.run_task`, in which order, and where."""
