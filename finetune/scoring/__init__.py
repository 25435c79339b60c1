"""Log-likelihoods of rows under a base, adapters and checkpoints."""
