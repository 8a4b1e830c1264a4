"""Replace the softmax attention of a model by another operator."""
