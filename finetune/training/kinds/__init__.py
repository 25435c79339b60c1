"""What trains in a run: one type for each kind, loaded by its name."""
