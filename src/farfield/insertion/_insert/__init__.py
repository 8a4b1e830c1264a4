"""Insert modules at places of a model, and remove them."""
