"""Readers of the field's file formats, which check what they read."""
