"""A model of transformers, taken apart into front, layers and tail."""
