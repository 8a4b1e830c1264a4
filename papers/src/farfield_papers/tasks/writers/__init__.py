"""Callbacks that write the files and folders of `farfield predict`."""
