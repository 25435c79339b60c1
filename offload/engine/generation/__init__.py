"""Generation with a key-value cache, by passes over the layers."""
