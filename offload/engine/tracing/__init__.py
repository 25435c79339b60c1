"""What a step takes of device memory, by running it without weights and arithmetic."""
