"""Host memory: where layers wait, how they leave it, and what of it is near the device."""
