"""The device and host memory of each part of a step."""
