"""From a published checkpoint to a model on the host, and to what a plan knows of it."""
