"""From a trained softmax network to a linear one, without labels."""
