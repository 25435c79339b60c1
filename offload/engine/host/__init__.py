"""Host memory: where layers are stored, how they leave it, and which part is near the device."""
