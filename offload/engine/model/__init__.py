"""A transformers model, split into front, layers and tail."""
