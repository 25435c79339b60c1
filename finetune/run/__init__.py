"""What a run leaves on disk: its directory, lock, checkpoints and metrics."""
