"""The device memory of a step, found by running it without weights and arithmetic."""
