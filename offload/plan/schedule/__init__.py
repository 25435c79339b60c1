"""The ops of a step in order, what waits for what, and when each runs."""
