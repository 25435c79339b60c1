"""After training: merged weights, GGUF, and adapters in layouts of others."""
