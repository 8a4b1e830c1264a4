"""Files and folders that `farfield predict` writes, one kind of output a module."""
